// Which gradients and state lie otherwise than their weights: asked before each step of a fused optimizer.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "weights/memory_format.h"

namespace nhwc {
namespace {

bool differ(const at::Tensor& weight, const at::Tensor& companion) {
  const bool are_comparable = weight.layout() == at::kStrided && companion.layout() == at::kStrided &&
                              weight.sizes() == companion.sizes() && weight.numel() > 0;
  return are_comparable && !are_same_places(companion, weight.strides());
}

std::vector<int64_t> differing_layouts(at::TensorList weights, at::TensorList companions) {
  TORCH_CHECK(weights.size() == companions.size(), "nhwc::differing_layouts: expected a weight for each of ",
              companions.size(), " companions, got ", weights.size());
  std::vector<int64_t> differing;
  for (size_t index = 0; index < weights.size(); ++index) {
    if (differ(weights[index], companions[index])) differing.push_back(static_cast<int64_t>(index));
  }
  return differing;
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { m.impl("differing_layouts", TORCH_FN(differing_layouts)); }

}  // namespace nhwc
