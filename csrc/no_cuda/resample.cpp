// Replaces cuda/ where the library is built without CUDA: no kernel resamples anything.
#include "cuda/resample.h"

namespace nhwc::cuda {

bool can_resample(const Resampling&, const at::Tensor&) { return false; }
void resample(const Resampling&, const at::Tensor& input, const at::Tensor&) {
  TORCH_INTERNAL_ASSERT(false, "no device has a kernel for ", input.device());
}

}  // namespace nhwc::cuda
