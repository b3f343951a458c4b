// Softmax of many rows at once, compiled for one instruction set. Free of torch and of the standard library's code, as
// filter_kernels.h.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// Kernels on a block of rows that is transposed: a matrix of `channels` x `rows`, each column of which is a row of its
/// own. In place.
struct SoftmaxKernels {
  using Forward = void (*)(float* values, std::int64_t channels, std::int64_t rows);
  /// From the gradient of the output to that of the input.
  using Backward = void (*)(float* gradients, const float* outputs, std::int64_t channels, std::int64_t rows);

  Forward softmax, log_softmax;
  Backward softmax_backward, log_softmax_backward;
};

namespace levels {

extern const SoftmaxKernels softmax_baseline;
extern const SoftmaxKernels softmax_avx2;
extern const SoftmaxKernels softmax_avx512;
extern const SoftmaxKernels softmax_neon;

}  // namespace levels
}  // namespace nhwc::cpu
