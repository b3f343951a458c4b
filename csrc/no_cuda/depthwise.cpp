// Replaces cuda/ where the library is built without CUDA: no kernel serves any convolution.
#include "cuda/depthwise.h"

namespace nhwc::cuda {

bool can_run(const Depthwise&, const at::Tensor&) { return false; }
void depthwise_forward(const Depthwise&, const at::Tensor& input, const at::Tensor&, const at::Tensor&) {
  TORCH_INTERNAL_ASSERT(false, "no device has a kernel for ", input.device());
}
void depthwise_input_gradient(const Depthwise&, const at::Tensor& grad, const at::Tensor&) {
  TORCH_INTERNAL_ASSERT(false, "no device has a kernel for ", grad.device());
}
void depthwise_weight_gradient(const Depthwise&, const at::Tensor& grad, const at::Tensor&, const at::Tensor&) {
  TORCH_INTERNAL_ASSERT(false, "no device has a kernel for ", grad.device());
}

}  // namespace nhwc::cuda
