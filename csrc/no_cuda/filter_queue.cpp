// In the place of cuda/ where the library is built without CUDA: no kernel serves any weight.
#include "cuda/filter_queue.h"

namespace nhwc::cuda {

bool FilterQueue::add_write(const at::Tensor&, const at::Tensor&) { return false; }
void FilterQueue::add_permutation(const at::Tensor& weight) {
  TORCH_INTERNAL_ASSERT(false, "no device has a kernel for ", weight.device());
}
void FilterQueue::allocate() {}
void FilterQueue::run() const {}

bool can_permute(const at::Tensor&) { return false; }
bool is_captured(at::Device) { return false; }

}  // namespace nhwc::cuda
