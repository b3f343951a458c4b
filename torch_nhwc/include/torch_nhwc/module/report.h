// What became of the convolution weights of a module, as data and as text.
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
  convert,   ///< it was brought into the format, and bytes moved
  restride,  ///< only its strides changed
  keep,      ///< there was nothing to do, or it was not asked for
  refuse,    ///< it should have changed and could not
};

/// What became of one site: one weight of one convolution layer.
struct SiteReport {
  std::string path;                          ///< of the layer in the module; empty for the module itself
  std::string name;                          ///< of the weight in the layer
  std::string layer;                         ///< the layer's class
  std::vector<std::int64_t> sizes;           ///< of the weight; empty, like the strides, where there is no strided one
  std::vector<std::int64_t> strides;         ///< before
  std::vector<std::int64_t> target_strides;  ///< those of the format, empty where the site is not asked for
  Action action = Action::keep;
  std::optional<Outcome> outcome = std::nullopt;  ///< the operators', nothing where they were not asked
  std::string reason = "";                        ///< why the site was kept or refused, or is contiguous; else empty
};

/// What became of every site of a module.
struct ModuleReport {
  /// In the order of registration, or of the graphs. A layer that the module holds twice has one site; layers that
  /// share a weight have one each, and the weight is converted once.
  std::vector<SiteReport> sites;

  /// The number of sites by what was done to them, in one line.
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

/// One line, without an end.
inline std::ostream& operator<<(std::ostream& out, const SiteReport& site) {
  out << module_detail::join(site.path, site.name) << " (" << site.layer << ")";
  if (!site.sizes.empty()) out << " " << at::IntArrayRef(site.sizes);
  out << ": " << site.action << ", ";
  if (!site.reason.empty()) return out << site.reason;
  return out << "strides " << at::IntArrayRef(site.strides) << " to " << at::IntArrayRef(site.target_strides);
}

/// One line for each site, and the summary.
inline std::ostream& operator<<(std::ostream& out, const ModuleReport& report) {
  for (const SiteReport& site : report.sites) out << site << "\n";
  return out << report.summary() << "\n";
}

}  // namespace nhwc
