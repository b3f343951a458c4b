// Replaces cuda/ where the library is built without CUDA: no kernel computes an RMS norm.
#include "cuda/rms.h"

namespace nhwc::cuda {

bool can_run(const ChannelRms&) { return false; }
void channel_rms_norm(const ChannelRms& rms, const at::Tensor&) {
  TORCH_INTERNAL_ASSERT(false, "no device has a kernel for ", rms.input.device());
}
void channel_rms_norm_backward(const ChannelRms& rms, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                               const at::Tensor&) {
  TORCH_INTERNAL_ASSERT(false, "no device has a kernel for ", rms.input.device());
}

}  // namespace nhwc::cuda
