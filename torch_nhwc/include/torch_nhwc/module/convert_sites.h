// Converts the weights that a walk over a module has found, and reports what happened to them.
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

/// The options of `convert_module_`.
struct ModuleOptions {
  /// By default channels-last of each weight's rank. `ChannelsLast` converts only the 4D weights, `ChannelsLast3d` only
  /// the 5D ones, and `Contiguous` both.
  std::optional<at::MemoryFormat> memory_format = std::nullopt;
  /// "auto", "fresh", "reuse" or "detach", see `convert_weights_` of ops.h.
  std::string storage = "auto";
  /// Whether to raise if a requested site cannot be converted.
  bool strict = false;
  /// Returns whether to convert the weight of the layer with this path. By default all are converted.
  std::function<bool(const std::string& path)> filter = nullptr;
};

namespace module_detail {

// A site that a walk has found.
struct Site {
  std::string path;
  std::string name;
  std::string layer;
  std::int64_t rank;             // of the weight, 0 if unknown
  at::Tensor weight;             // undefined if the layer has none
  std::string_view reason = "";  // why the weight cannot be converted, if the walk knows that it cannot
  std::int64_t groups = 0;       // of the convolution, 0 if unknown
};

// Returns the format for a site: contiguous, if its only group has filters of one channel. PyTorch computes some such
// convolutions wrong on channels-last, and the order of their elements is the same.
inline std::optional<at::MemoryFormat> format_of(const Site& site, std::optional<at::MemoryFormat> requested) {
  const bool has_sizes = site.weight.defined() && site.weight.layout() == at::kStrided && site.weight.dim() > 1;
  return has_sizes && site.groups == 1 && site.weight.size(1) == 1 ? at::MemoryFormat::Contiguous : requested;
}

inline std::vector<std::int64_t> target_strides_of(at::IntArrayRef sizes,
                                                   std::optional<at::MemoryFormat> memory_format) {
  if (memory_format == at::MemoryFormat::Contiguous) return at::IntArrayRef(c10::contiguous_strides(sizes)).vec();
  return sizes.size() == 5 ? c10::get_channels_last_strides_3d(sizes) : c10::get_channels_last_strides_2d(sizes);
}

// Returns whether a weight of this rank can have the format.
inline bool serves_rank(std::optional<at::MemoryFormat> memory_format, std::int64_t rank) {
  if (rank == 0 || !memory_format || memory_format == at::MemoryFormat::Contiguous) return true;
  return rank == (memory_format == at::MemoryFormat::ChannelsLast ? 4 : 5);
}

// Raises what the operators would raise for any weight, and if the library is not loaded.
inline void check_options(const ModuleOptions& options) {
  const auto format = options.memory_format.value_or(at::MemoryFormat::Contiguous);
  TORCH_CHECK(format == at::MemoryFormat::Contiguous || format == at::MemoryFormat::ChannelsLast ||
                  format == at::MemoryFormat::ChannelsLast3d,
              "nhwc::convert_module_: expected contiguous_format, channels_last or channels_last_3d, got ", format);
  plan_weights(at::TensorList(), options.memory_format, options.storage);
}

// Returns why the operators refuse a weight, as in their errors; empty if they do not.
inline std::string refusal(const at::Tensor& weight, std::optional<at::MemoryFormat> format, const std::string& storage,
                           std::optional<Outcome>& outcome) {
  try {
    outcome = plan_weights({weight}, format, storage).front();
  } catch (const c10::Error& error) {
    const std::string message = error.what_without_backtrace();
    return message.substr(message.find(": ") + 2);  // after the name of an operator that the caller did not call
  }
  if (*outcome >= Outcome::unchanged) return "";
  std::string reason = sentence(name_of(*outcome));
  if (reason.rfind("it ", 0) == 0) reason.replace(0, 2, "the weight");
  return c10::str(reason, " (shape ", weight.sym_sizes(), ", strides ", weight.sym_strides(), ", dtype ",
                  weight.scalar_type(), ", device ", weight.device(), ")");
}

// Returns the row of a site before anything is converted. It has no reason if the operator will be called.
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
    const bool is_in_format = !row.strides.empty() && row.strides == row.target_strides;
    row.reason = is_in_format || site.reason.empty() ? refusal(site.weight, format, options.storage, row.outcome)
                                                     : sentence(site.reason);
    if (!row.reason.empty()) row.action = Action::refuse;
  }
  return row;
}

// Returns the rows of all sites. A site that shares memory with other parameters or buffers may only change with them.
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
    if (!row.reason.empty() || row.outcome == Outcome::unchanged) continue;
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
  TORCH_CHECK(!options.strict || refused.str().empty(), "nhwc::convert_module_: nothing was changed, because of",
              refused.str());
  // Weights in format are included, for their gradients.
  const auto outcomes = set_strides_(weights, strides, options.storage);
  for (size_t index = 0; index < rows.size(); ++index) {
    SiteReport& row = report.sites[rows[index]];
    row.outcome = outcomes[index];
    const auto format = format_of(sites[rows[index]], options.memory_format);
    if (format != options.memory_format) row.reason = sentence("ONE_CHANNEL");
    if (row.outcome == Outcome::unchanged) {
      if (row.reason.empty()) row.reason = sentence("IN_FORMAT");
    } else {
      row.action = row.outcome == Outcome::restrided ? Action::restride : Action::convert;
    }
  }
  return report;
}

}  // namespace module_detail
}  // namespace nhwc
