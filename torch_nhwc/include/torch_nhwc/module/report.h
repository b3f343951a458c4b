// The report of a conversion, as data and as text.
#pragma once

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <ostream>
#include <sstream>
#include <string>
#include <vector>

#include "torch_nhwc/ops.h"

namespace nhwc {

/// What happened to a site.
enum class Action {
  convert,   ///< it was converted, and bytes moved
  restride,  ///< only its strides changed
  keep,      ///< there was nothing to do, or it was not requested
  refuse,    ///< it was requested and cannot be converted
};

/// The result for one site: one weight of one convolution layer.
struct SiteReport {
  std::string path;                          ///< of the layer in the module; empty for the module itself
  std::string name;                          ///< of the weight in the layer
  std::string layer;                         ///< the layer's class
  std::vector<std::int64_t> sizes;           ///< of the weight; empty, like the strides, without a strided weight
  std::vector<std::int64_t> strides;         ///< before
  std::vector<std::int64_t> target_strides;  ///< those of the format; empty if the site is not requested
  Action action = Action::keep;
  std::optional<Outcome> outcome = std::nullopt;  ///< of the operator, if it was called
  std::string reason = "";                        ///< why the site is kept, refused or contiguous; otherwise empty
};

/// The results for all sites of a module.
struct ModuleReport {
  /// In the order of registration, or of the graphs. A layer that the module holds twice is one site. Layers that share
  /// a weight are separate sites, and the weight is converted once.
  std::vector<SiteReport> sites;

  /// Returns the number of sites by their action, in one line.
  std::string summary() const;
};

namespace module_detail {

inline std::string join(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

}  // namespace module_detail

inline std::ostream& operator<<(std::ostream& out, Action action) {
  constexpr const char* names[] = {"convert", "restride", "keep", "refuse"};
  return out << names[static_cast<int>(action)];
}

inline std::string ModuleReport::summary() const {
  std::ostringstream out;
  out << sites.size() << (sites.size() == 1 ? " site" : " sites");
  const char* separator = ": ";
  for (const Action action : {Action::convert, Action::restride, Action::keep, Action::refuse}) {
    const auto has_action = [action](const SiteReport& site) { return site.action == action; };
    out << separator << std::count_if(sites.begin(), sites.end(), has_action) << " " << action;
    separator = ", ";
  }
  return out.str();
}

/// Writes one line, without a line break.
inline std::ostream& operator<<(std::ostream& out, const SiteReport& site) {
  out << module_detail::join(site.path, site.name) << " (" << site.layer << ")";
  if (!site.sizes.empty()) out << " " << at::IntArrayRef(site.sizes);
  out << ": " << site.action << ", ";
  if (!site.reason.empty()) return out << site.reason;
  return out << "strides " << at::IntArrayRef(site.strides) << " to " << at::IntArrayRef(site.target_strides);
}

/// Writes one line for each site, and the summary.
inline std::ostream& operator<<(std::ostream& out, const ModuleReport& report) {
  for (const SiteReport& site : report.sites) out << site << "\n";
  return out << report.summary() << "\n";
}

}  // namespace nhwc
