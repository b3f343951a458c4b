#include "batch/weight_batch.h"

namespace nhwc {
namespace {

// PyTorch's copy has no kernel for some dtypes, for example those of less than a byte, so elements move as integers.
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

void WeightBatch::write_or_add(const at::Tensor& weight, const at::Tensor& out) {
  const bool is_added =
      weight.is_cpu() ? on_cpu_.add_write(weight, out) : weight.is_cuda() && on_cuda_.add_write(weight, out);
  if (!is_added) copy_by_torch(weight, out);
}

void WeightBatch::add_permutation(const at::Tensor& weight) {
  weight.is_cpu() ? on_cpu_.add_permutation(weight) : on_cuda_.add_permutation(weight);
}

void WeightBatch::allocate() {
  on_cuda_.allocate();
  on_cpu_.allocate();
}

void WeightBatch::run() const {
  on_cuda_.run();
  on_cpu_.run();
}

bool can_permute(const at::Tensor& weight) {
  return weight.is_cpu() || (weight.is_cuda() && cuda::can_permute(weight));
}

}  // namespace nhwc
