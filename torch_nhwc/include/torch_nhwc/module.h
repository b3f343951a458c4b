// Converts the convolution weights of a torch::nn::Module or a torch::jit::Module in one call.
//
// Everything here is inline over ops.h, which says how to load or link the library. The including file needs LibTorch's
// C++ API (torch/torch.h) or TorchScript's (torch/script.h), whichever its model uses. module/convert_sites.h has the
// options of a conversion, module/report.h its report.
#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>

#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

#include "torch_nhwc/module/convert_sites.h"
#include "torch_nhwc/module/report.h"
#include "torch_nhwc/module/script_walk.h"

namespace nhwc {
namespace module_detail {

// Returns the weight of a module that is, or derives from, one of the layers, and sets the groups; null for others.
template <typename... Layers>
const at::Tensor* weight_of(const torch::nn::Module& module, std::int64_t& groups) {
  const at::Tensor* weight = nullptr;
  const auto look = [&](const auto* layer) {
    if (layer) weight = &layer->weight, groups = layer->options.groups();
  };
  (look(dynamic_cast<const Layers*>(&module)), ...);
  return weight;
}

// Not by named_modules, which requires modules that a shared_ptr owns, and lists a module that is held twice two times.
inline void find_sites(const torch::nn::Module& module, const std::string& path,
                       std::unordered_set<const torch::nn::Module*>& seen, std::vector<Site>& sites) {
  using namespace torch::nn;
  if (!seen.insert(&module).second) return;
  std::int64_t groups = 0;
  if (const auto* weight =
          weight_of<Conv2dImpl, Conv3dImpl, ConvTranspose2dImpl, ConvTranspose3dImpl>(module, groups)) {
    sites.push_back({path, "weight", module.name(), weight->defined() ? weight->dim() : 0, *weight,
                     weight->defined() ? "" : "UNDEFINED", groups});
  }
  for (const auto& child : module.named_children()) {
    find_sites(*child.value(), join(path, child.key()), seen, sites);
  }
}

// Returns the parameters and buffers of a module of either kind.
template <typename Module>
std::vector<at::Tensor> tensors_of(const Module& module) {
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& parameter : module.parameters()) tensors.push_back(parameter);
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  return tensors;
}

}  // namespace module_detail

/// Converts the weights of all convolution layers of a module to a memory format: `Conv2d`, `Conv3d`, their transposed
/// kinds and classes that derive from them, the module itself included. Weights change as by `convert_weights_` of
/// ops.h, in one call of it and all or nothing: `.grad` follows, shared weights stay shared, and weights that are in
/// format stay untouched. A weight that shares memory with another parameter or buffer in another view is refused.
///
/// @returns what happened to each site; a site that cannot be converted is unchanged, and its row has the reason.
/// @throws c10::Error, before anything is touched: under `strict`, where a requested site cannot be converted; for
///         another storage or memory format. From within the conversion, as `convert_weights_` of ops.h.
inline ModuleReport convert_module_(torch::nn::Module& module, const ModuleOptions& options = {}) {
  std::vector<module_detail::Site> sites;
  std::unordered_set<const torch::nn::Module*> seen;
  module_detail::find_sites(module, "", seen, sites);
  return module_detail::convert_sites(sites, module_detail::tensors_of(module), options);
}

/// The same for TorchScript: scripted, traced or loaded from an archive. The sites are the parameters and buffers that
/// a method passes to a convolution unchanged. Weights that a graph computes, holds as constants (a frozen module) or
/// packs (a quantized one) are no sites: convert before freezing or quantizing, or from Python, which reports them.
inline ModuleReport convert_module_(torch::jit::Module& module, const ModuleOptions& options = {}) {
  return module_detail::convert_sites(module_detail::ScriptWalk(module).sites(), module_detail::tensors_of(module),
                                      options);
}

}  // namespace nhwc
