#include "device_conversions.h"

#include "convert_weight.h"

namespace nhwc {

#ifdef TORCH_NHWC_WITH_CUDA

void DeviceConversions::add_write(const at::Tensor& weight, const at::Tensor& out) {
  if (!weight.is_cuda() || !cuda_.add_write(weight, out)) copy_any_strides(weight, out);
}
void DeviceConversions::add_permutation(const at::Tensor& weight) { cuda_.add_permutation(weight); }
void DeviceConversions::allocate() { cuda_.allocate(); }
void DeviceConversions::run() const { cuda_.run(); }

bool can_permute(const at::Tensor& weight) {
  return weight.is_cpu() || (weight.is_cuda() && cuda::can_permute(weight));
}
bool is_captured(const at::Tensor& tensor) { return tensor.is_cuda() && cuda::is_captured(tensor.device()); }

#else

void DeviceConversions::add_write(const at::Tensor& weight, const at::Tensor& out) { copy_any_strides(weight, out); }
void DeviceConversions::add_permutation(const at::Tensor& weight) {
  TORCH_INTERNAL_ASSERT(false, "no device has a kernel for ", weight.device());
}
void DeviceConversions::allocate() {}
void DeviceConversions::run() const {}

bool can_permute(const at::Tensor& weight) { return weight.is_cpu(); }
bool is_captured(const at::Tensor&) { return false; }

#endif

}  // namespace nhwc
