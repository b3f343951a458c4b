// Finds gradients and state whose layout is not their weight's, before each step of a fused optimizer.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "layout/memory_format.h"

namespace nhwc {
namespace {

bool differ(const at::Tensor& weight, const at::Tensor& companion) {
  const bool are_comparable = weight.layout() == at::kStrided && companion.layout() == at::kStrided &&
                              weight.sizes() == companion.sizes() && weight.numel() > 0;
  return are_comparable && !are_same_places(companion, weight.strides());
}

std::vector<int64_t> mismatched_layouts_kernel(at::TensorList weights, at::TensorList companions) {
  TORCH_CHECK(weights.size() == companions.size(), "nhwc::mismatched_layouts: expected a weight for each of ",
              companions.size(), " companions, got ", weights.size());
  std::vector<int64_t> differing;
  for (size_t index = 0; index < weights.size(); ++index) {
    if (differ(weights[index], companions[index])) differing.push_back(static_cast<int64_t>(index));
  }
  return differing;
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) {
  m.impl("mismatched_layouts", TORCH_FN(mismatched_layouts_kernel));
}

}  // namespace nhwc
