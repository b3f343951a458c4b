// The one way from the weights that a walk over a module has found to their conversion and its report.
#pragma once

#include <c10/core/MemoryFormat.h>
#include <c10/util/Exception.h>
#include <c10/util/strides.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "torch_nhwc/module/report.h"
#include "torch_nhwc/module/tied_by_view.h"
#include "torch_nhwc/ops.h"

namespace nhwc {

/// Which sites of a module are converted, and how.
struct ModuleOptions {
  /// Nothing: channels-last, by the rank of each weight. `ChannelsLast` converts the 4D weights and `ChannelsLast3d`
  /// the 5D ones, and the others are kept; `Contiguous` goes for both.
  std::optional<at::MemoryFormat> memory_format = std::nullopt;
  /// Where the bytes go: "auto", "fresh", "reuse" or "detach", see `convert_weights_` of ops.h.
  std::string storage = "auto";
  /// Raise where a site cannot be converted, instead of leaving it as it is.
  bool strict = false;
  /// Takes the path of a layer and says whether its weight is to be converted. Nothing: all are.
  std::function<bool(const std::string& path)> filter = nullptr;
};

namespace module_detail {

// A site as a walk finds it.
struct Site {
  std::string path;
  std::string name;
  std::string layer;
  std::int64_t rank;             // of the weight, 0 where nothing tells
  at::Tensor weight;             // undefined where the walk has none
  std::string_view reason = "";  // why the weight cannot be converted, where the walk knows of something against it
  std::int64_t groups = 0;       // of the convolution, 0 where they are not known
};

// What a format comes to for a convolution: contiguous, where filters of one group have one channel. PyTorch computes
// some of those wrong on channels-last, and nothing would lie elsewhere.
inline std::optional<at::MemoryFormat> format_of(const Site& site, std::optional<at::MemoryFormat> wanted) {
  const bool has_sizes = site.weight.defined() && site.weight.layout() == at::kStrided && site.weight.dim() > 1;
  return has_sizes && site.groups == 1 && site.weight.size(1) == 1 ? at::MemoryFormat::Contiguous : wanted;
}

inline std::vector<std::int64_t> target_strides_of(at::IntArrayRef sizes,
                                                   std::optional<at::MemoryFormat> memory_format) {
  if (memory_format == at::MemoryFormat::Contiguous) return at::IntArrayRef(c10::contiguous_strides(sizes)).vec();
  return sizes.size() == 5 ? c10::get_channels_last_strides_3d(sizes) : c10::get_channels_last_strides_2d(sizes);
}

// Whether the format is one that a weight of this rank can have.
inline bool serves_rank(std::optional<at::MemoryFormat> memory_format, std::int64_t rank) {
  if (rank == 0 || !memory_format || memory_format == at::MemoryFormat::Contiguous) return true;
  return rank == (memory_format == at::MemoryFormat::ChannelsLast ? 4 : 5);
}

// What the operators would raise for every weight alike, and for the lack of the library.
inline void check_options(const ModuleOptions& options) {
  const auto format = options.memory_format.value_or(at::MemoryFormat::Contiguous);
  TORCH_CHECK(format == at::MemoryFormat::Contiguous || format == at::MemoryFormat::ChannelsLast ||
                  format == at::MemoryFormat::ChannelsLast3d,
              "nhwc::convert_weights_: expected contiguous_format, channels_last or channels_last_3d, got ", format);
  plan_weights(at::TensorList(), options.memory_format, options.storage);
}

// Why the operators refuse a weight, as their errors have it; empty where they do not.
inline std::string refusal(const at::Tensor& weight, std::optional<at::MemoryFormat> format, const std::string& storage,
                           std::optional<Outcome>& outcome) {
  try {
    outcome = plan_weights({weight}, format, storage).front();
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    return message.substr(message.find(": ") + 2);  // behind the operator, which the caller did not call
  }
  if (*outcome >= Outcome::kept) return "";
  std::string reason = sentence(name_of(*outcome));
  if (reason.rfind("it ", 0) == 0) reason.replace(0, 2, "the weight");
  return c10::str(reason, " (shape ", weight.sym_sizes(), ", strides ", weight.sym_strides(), ", dtype ",
                  weight.scalar_type(), ", device ", weight.device(), ")");
}

// The row of a site before anything is converted: there is no reason where the operator is to be called.
inline SiteReport plan_site(const Site& site, const ModuleOptions& options) {
  SiteReport row{site.path, site.name, site.layer, {}, {}, {}};
  if (site.weight.defined() && site.weight.layout() == at::kStrided) {
    row.sizes = site.weight.sizes().vec();
    row.strides = site.weight.strides().vec();
  }
  if (options.filter && !options.filter(site.path)) {
    row.reason = sentence("FILTERED");
  } else if (!serves_rank(options.memory_format, site.rank)) {
    row.reason = sentence("OTHER_RANK");
  } else {
    const auto format = format_of(site, options.memory_format);
    if (row.sizes.size() == 4 || row.sizes.size() == 5) {
      row.target_strides = target_strides_of(row.sizes, format);
    }
    // A constant that was converted before it was frozen is as it should be.
    const bool is_in_format = !row.strides.empty() && row.strides == row.target_strides;
    row.reason = is_in_format || site.reason.empty() ? refusal(site.weight, format, options.storage, row.outcome)
                                                     : sentence(site.reason);
    if (!row.reason.empty()) row.action = Action::refuse;
  }
  return row;
}

// The rows of all sites, of which those that share memory with other parameters or buffers may change with them alone.
inline std::vector<SiteReport> plan_sites(const std::vector<Site>& sites, std::vector<at::Tensor> tensors,
                                          const ModuleOptions& options) {
  std::vector<SiteReport> rows;
  Identities changing;
  for (const Site& site : sites) {
    rows.push_back(plan_site(site, options));
    if (rows.back().reason.empty()) changing.insert(site.weight.unsafeGetTensorImpl());
    tensors.push_back(site.weight);
  }
  const Identities tied = tied_by_view(tensors, changing);
  for (size_t index = 0; index < rows.size(); ++index) {
    SiteReport& row = rows[index];
    if (!row.reason.empty() || row.outcome == Outcome::kept) continue;
    if (!tied.count(sites[index].weight.unsafeGetTensorImpl())) continue;
    row.action = Action::refuse;
    row.outcome = std::nullopt;
    row.reason = sentence("TIED_BY_VIEW");
  }
  return rows;
}

inline ModuleReport convert_sites(const std::vector<Site>& sites, std::vector<at::Tensor> tensors,
                                  const ModuleOptions& options) {
  check_options(options);
  ModuleReport report{plan_sites(sites, std::move(tensors), options)};
  std::vector<at::Tensor> weights;
  std::vector<size_t> rows;  // of the weights
  std::vector<std::int64_t> strides;
  Identities seen;
  std::ostringstream refused;
  for (size_t index = 0; index < sites.size(); ++index) {
    SiteReport& row = report.sites[index];
    if (row.action == Action::refuse) refused << "\n  " << row;
    if (!row.reason.empty()) continue;
    if (seen.insert(sites[index].weight.unsafeGetTensorImpl()).second) {
      weights.push_back(sites[index].weight);
      rows.push_back(index);
      strides.insert(strides.end(), row.target_strides.begin(), row.target_strides.end());
    } else {
      row.reason = sentence("TIED");
    }
  }
  TORCH_CHECK(!options.strict || refused.str().empty(), "nhwc::convert_weights_: nothing was changed, because of",
              refused.str());
  // Weights in format as well, for their gradients.
  const auto outcomes = lay_out_weights_(weights, strides, options.storage);
  for (size_t index = 0; index < rows.size(); ++index) {
    SiteReport& row = report.sites[rows[index]];
    row.outcome = outcomes[index];
    const auto format = format_of(sites[rows[index]], options.memory_format);
    if (format != options.memory_format) row.reason = sentence("ONE_CHANNEL");
    if (row.outcome == Outcome::kept) {
      if (row.reason.empty()) row.reason = sentence("IN_FORMAT");
    } else {
      row.action = row.outcome == Outcome::restrided ? Action::restride : Action::convert;
    }
  }
  return report;
}

}  // namespace module_detail
}  // namespace nhwc
