// Replaces cuda/ where the library is built without CUDA: no kernel serves any norm.
#include "cuda/norms.h"

namespace nhwc::cuda {

bool runs_norms(at::Device) {
  norm_switch();  // a wrong value is one here, too
  return false;
}
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
