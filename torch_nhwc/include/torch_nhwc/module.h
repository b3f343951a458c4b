// Whole models in C++: the convolution weights of a torch::nn::Module or a torch::jit::Module, converted in one call.
//
// Everything here is inline over ops.h, and the library has to be loaded or linked as it says there. The including file
// needs LibTorch's C++ API (torch/torch.h) or TorchScript's (torch/script.h), whichever its model is made of.
// module/convert_sites.h has the options of a conversion, module/report.h what it reports.
#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>

#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

#include "torch_nhwc/module/convert_sites.h"
#include "torch_nhwc/module/graph_walk.h"
#include "torch_nhwc/module/report.h"

namespace nhwc {
namespace module_detail {

// The weight of a module that is, or derives from, one of the layers, and the layer's groups; null for others.
template <typename... Layers>
const at::Tensor* weight_of(const torch::nn::Module& module, std::int64_t& groups) {
  const at::Tensor* weight = nullptr;
  const auto look = [&](const auto* layer) {
    if (layer) weight = &layer->weight, groups = layer->options.groups();
  };
  (look(dynamic_cast<const Layers*>(&module)), ...);
  return weight;
}

// By hand, since named_modules wants modules that a shared_ptr owns, and lists one that is held twice two times.
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

// The parameters and buffers of a module of either kind.
template <typename Module>
std::vector<at::Tensor> tensors_of(const Module& module) {
  std::vector<at::Tensor> tensors;
  for (const at::Tensor& parameter : module.parameters()) tensors.push_back(parameter);
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  return tensors;
}

}  // namespace module_detail

/// Brings the weights of all convolution layers of a module into a memory format: `Conv2d`, `Conv3d`, their transposed
/// kinds and what derives from them, the module itself included. Weights change as by `convert_weights_` of ops.h, in
/// one call of it and all or nothing: `.grad` follows, shared weights stay shared, and what is in format is left alone.
/// A weight that shares memory with another parameter or buffer in another view cannot be converted.
///
/// @returns what became of each site; sites that cannot be converted are left as they are, with the reason.
/// @throws c10::Error, before anything is touched: under `strict`, where a site that was asked for cannot be converted;
///         for another storage or memory format. From within the conversion, as `convert_weights_` of ops.h.
inline ModuleReport convert_weights_(torch::nn::Module& module, const ModuleOptions& options = {}) {
  std::vector<module_detail::Site> sites;
  std::unordered_set<const torch::nn::Module*> seen;
  module_detail::find_sites(module, "", seen, sites);
  return module_detail::convert_sites(sites, module_detail::tensors_of(module), options);
}

/// The same for TorchScript: scripted, traced or loaded from an archive. The sites are the tensors that the module's
/// graphs pass to a convolution as its weight, in whatever layer, parameter or buffer. Those that a graph computes or
/// has as constants (a frozen module) are refused, and packed ones (quantized, or for oneDNN); what a method takes as
/// an argument is its caller's.
inline ModuleReport convert_weights_(torch::jit::Module& module, const ModuleOptions& options = {}) {
  return module_detail::convert_sites(module_detail::GraphWalk(module).sites(), module_detail::tensors_of(module),
                                      options);
}

}  // namespace nhwc
