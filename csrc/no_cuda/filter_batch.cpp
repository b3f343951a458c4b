// Replaces cuda/ where the library is built without CUDA: no kernel serves any weight.
#include "cuda/filter_batch.h"

namespace nhwc::cuda {

bool FilterBatch::add_write(const at::Tensor&, const at::Tensor&) { return false; }
void FilterBatch::add_permutation(const at::Tensor& weight) {
  TORCH_INTERNAL_ASSERT(false, "no device has a kernel for ", weight.device());
}
void FilterBatch::allocate() {}
void FilterBatch::run() const {}

bool can_permute(const at::Tensor&) { return false; }
bool is_captured(at::Device) { return false; }

}  // namespace nhwc::cuda
