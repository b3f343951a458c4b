#include "cpu/softmax.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "cpu/dispatch.h"

namespace nhwc::cpu {
namespace {

// A block stays in a first-level cache of 32 KiB with what it is read from.
constexpr int64_t block_elements = 4096;
// Rows of a block come by this number, so that none is left over beside full registers.
constexpr int64_t whole_rows = 16;

// The transposes of a block, with the casts between its type and float.
struct Block {
  FilterKernels::Transpose load, store;
  int64_t element_size;
};

Block block_of(at::ScalarType type) {
  const FilterKernels& kernels = filter_kernels();
  if (type == at::kBFloat16) return {kernels.bfloat16_to_float, kernels.float_to_bfloat16, 2};
  if (type == at::kHalf) return {kernels.half_to_float, kernels.float_to_half, 2};
  return {kernels.transpose[2], kernels.transpose[2], 4};
}

// Calls `work` with the first row and the number of rows of each thread's part.
template <typename Work>
void in_parallel(const at::Tensor& rows, const Work& work) {
  constexpr int64_t elements_worth_a_thread = 1 << 15;
  const int64_t channels = rows.size(-1);
  at::parallel_for(0, rows.numel() / channels, std::max<int64_t>(elements_worth_a_thread / channels, 1),
                   [&](int64_t begin, int64_t end) { work(begin, end - begin); });
}

}  // namespace

bool has_softmax(at::ScalarType type, int64_t channels) {
  // More channels are enough for the registers of one row after the other, which is what PyTorch does.
  const int64_t most = type == at::kFloat ? 128 : 256;
  return channels <= most && has_softmax_backward(type);
}

bool has_softmax_backward(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

void softmax(const at::Tensor& input, const at::Tensor& out, bool log) {
  const Block block = block_of(input.scalar_type());
  const SoftmaxKernels::Forward kernel = log ? softmax_kernels().log_softmax : softmax_kernels().softmax;
  const int64_t channels = input.size(-1), row_bytes = channels * block.element_size;
  const auto* from = static_cast<const char*>(input.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const int64_t most = block_elements / channels / whole_rows * whole_rows;
  in_parallel(input, [&](int64_t first, int64_t count) {
    alignas(64) float values[block_elements];
    for (int64_t row = first; row < first + count; row += most) {
      const int64_t rows = std::min(most, first + count - row);
      block.load(from + row * row_bytes, values, 1, rows, channels, /*non_temporal=*/false);
      kernel(values, channels, rows);
      block.store(values, to + row * row_bytes, 1, channels, rows, /*non_temporal=*/false);
    }
  });
}

void softmax_backward(const at::Tensor& grad, const at::Tensor& output, const at::Tensor& out, bool log) {
  const SoftmaxKernels::BackwardByType& kernels =
      log ? softmax_kernels().log_softmax_backward : softmax_kernels().softmax_backward;
  const at::ScalarType type = output.scalar_type();
  const SoftmaxKernels::Backward kernel = type == at::kBFloat16 ? kernels.of_bfloat16
                                          : type == at::kHalf   ? kernels.of_half
                                                                : kernels.of_float;
  const int64_t channels = output.size(-1), row_bytes = channels * output.element_size();
  const auto* from = static_cast<const char*>(grad.const_data_ptr());
  const auto* beside = static_cast<const char*>(output.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  in_parallel(output, [&](int64_t row, int64_t rows) {
    const int64_t at = row * row_bytes;
    kernel(from + at, beside + at, to + at, channels, rows);
  });
}

}  // namespace nhwc::cpu
