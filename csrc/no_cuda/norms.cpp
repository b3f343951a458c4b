// Replaces cuda/ where the library is built without CUDA: no kernel serves any norm.
#include "cuda/norms.h"

namespace nhwc::cuda {

void set_norms(at::Device, at::IntArrayRef) {}
bool is_measured(at::Device) { return false; }
bool runs_norm(at::Device, NormKind, int64_t) { return false; }
bool runs_norms(at::Device) {
  norm_switch();  // a wrong value is one here, too
  return false;
}
std::string missing_image(at::Device) { return "the library was built without CUDA"; }
bool can_run(const GroupNorm&) { return false; }

static void refuse(const GroupNorm& norm) {
  TORCH_INTERNAL_ASSERT(false, "no device has a kernel for ", norm.input.device());
}
void group_norm(const GroupNorm& norm, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  refuse(norm);
}
void norm_statistics(const GroupNorm& norm, const at::Tensor&, const at::Tensor&) { refuse(norm); }
void normalise(const GroupNorm& norm, const at::Tensor&, const at::Tensor&, const at::Tensor&, const cpu::Activation&,
               const at::Tensor&) {
  refuse(norm);
}
void group_norm_backward(const GroupNorm& norm, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                         const at::Tensor&, const at::Tensor&, const at::Tensor&, const cpu::Activation&) {
  refuse(norm);
}

}  // namespace nhwc::cuda
