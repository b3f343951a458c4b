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

template <typename Kernel>
Kernel of_type(const SoftmaxKernels::ByType<Kernel>& kernels, at::ScalarType type) {
  return type == at::kBFloat16 ? kernels.of_bfloat16 : type == at::kHalf ? kernels.of_half : kernels.of_float;
}

const SoftmaxKernels::ByLogarithm& kernels_of(bool log) {
  return log ? softmax_kernels().log_softmax : softmax_kernels().softmax;
}

// Many rows side by side, by blocks.
void softmax_of_columns(const at::Tensor& input, const at::Tensor& out, bool log) {
  const Block block = block_of(input.scalar_type());
  const SoftmaxKernels::OfColumns kernel = kernels_of(log).of_columns;
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

}  // namespace

bool has_softmax(at::ScalarType type, int64_t channels) {
  return channels <= softmax_kernels().longest_row && has_softmax_backward(type);
}

bool has_softmax_backward(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

void softmax(const at::Tensor& input, const at::Tensor& out, bool log) {
  const int64_t channels = input.size(-1), row_bytes = channels * input.element_size();
  constexpr int64_t worth_a_row = 96;  // below it, the sums across registers take more than the transposes
  if (channels < worth_a_row) return softmax_of_columns(input, out, log);
  const SoftmaxKernels::Forward kernel = of_type(kernels_of(log).forward, input.scalar_type());
  const auto* from = static_cast<const char*>(input.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  in_parallel(input,
              [&](int64_t row, int64_t rows) { kernel(from + row * row_bytes, to + row * row_bytes, channels, rows); });
}

void softmax_backward(const at::Tensor& grad, const at::Tensor& output, const at::Tensor& out, bool log) {
  const SoftmaxKernels::Backward kernel = of_type(kernels_of(log).backward, output.scalar_type());
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
