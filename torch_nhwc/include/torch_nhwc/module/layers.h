// The convolution weights of a torch::nn::Module, by the classes of its layers.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/conv.h>

#include <string>
#include <unordered_set>
#include <vector>

#include "torch_nhwc/module/convert_sites.h"

namespace nhwc {
namespace module_detail {

// The weight of a module that is, or derives from, one of the layers; null for others.
template <typename... Layers>
const at::Tensor* weight_of(const torch::nn::Module& module) {
  const at::Tensor* weight = nullptr;
  const auto look = [&weight](const auto* layer) {
    if (layer) weight = &layer->weight;
  };
  (look(dynamic_cast<const Layers*>(&module)), ...);
  return weight;
}

// By hand, since named_modules wants modules that a shared_ptr owns, and lists one that is held twice two times.
inline void find_sites(const torch::nn::Module& module, const std::string& path,
                       std::unordered_set<const torch::nn::Module*>& seen, std::vector<Site>& sites) {
  using namespace torch::nn;
  if (!seen.insert(&module).second) return;
  if (const auto* weight = weight_of<Conv2dImpl, Conv3dImpl, ConvTranspose2dImpl, ConvTranspose3dImpl>(module)) {
    sites.push_back({path, "weight", module.name(), weight->defined() ? weight->dim() : 0, *weight,
                     weight->defined() ? "" : "NO_WEIGHT"});
  }
  for (const auto& child : module.named_children()) {
    find_sites(*child.value(), join(path, child.key()), seen, sites);
  }
}

}  // namespace module_detail
}  // namespace nhwc
