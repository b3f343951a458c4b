#include "writing/weight_queue.h"

namespace nhwc {
namespace {

// PyTorch's copy has no kernel for some dtypes, such as those of less than a byte; as integers their elements move too.
void copy_by_torch(const at::Tensor& weight, const at::Tensor& out) {
  constexpr std::pair<int64_t, at::ScalarType> integers[] = {
      {1, at::kByte}, {2, at::kShort}, {4, at::kInt}, {8, at::kLong}, {16, at::kComplexDouble}};
  if (weight.is_meta()) return;
  if (weight.scalar_type() != out.scalar_type()) {
    out.copy_(weight);
    return;
  }
  for (const auto& [size, integer] : integers) {
    if (size == weight.element_size()) out.view(integer).copy_(weight.view(integer));
  }
}

}  // namespace

void WeightQueue::write_or_queue(const at::Tensor& weight, const at::Tensor& out) {
  const bool is_queued =
      weight.is_cpu() ? on_cpu_.add_write(weight, out) : weight.is_cuda() && on_cuda_.add_write(weight, out);
  if (!is_queued) copy_by_torch(weight, out);
}

void WeightQueue::add_permutation(const at::Tensor& weight) {
  weight.is_cpu() ? on_cpu_.add_permutation(weight) : on_cuda_.add_permutation(weight);
}

void WeightQueue::allocate() {
  on_cuda_.allocate();
  on_cpu_.allocate();
}

void WeightQueue::run() const {
  on_cuda_.run();
  on_cpu_.run();
}

bool can_permute(const at::Tensor& weight) {
  return weight.is_cpu() || (weight.is_cuda() && cuda::can_permute(weight));
}

}  // namespace nhwc
