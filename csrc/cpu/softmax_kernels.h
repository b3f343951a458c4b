// Softmax of many rows at once, compiled for one instruction set. Free of torch and of the standard library's code, as
// filter_kernels.h.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

struct SoftmaxKernels {
  /// On a block of rows that is transposed: a matrix of `channels` x `rows`, each column of which is a row of its own.
  /// In place.
  using Forward = void (*)(float* values, std::int64_t channels, std::int64_t rows);
  /// From the gradients of the outputs to those of the inputs: dense rows of `channels`.
  using Backward = void (*)(const void* gradients, const void* outputs, void* to, std::int64_t channels,
                            std::int64_t rows);
  struct BackwardByType {
    Backward of_float, of_half, of_bfloat16;
  };

  Forward softmax, log_softmax;
  BackwardByType softmax_backward, log_softmax_backward;
};

namespace levels {

extern const SoftmaxKernels softmax_baseline;
extern const SoftmaxKernels softmax_avx2;
extern const SoftmaxKernels softmax_avx512;
extern const SoftmaxKernels softmax_neon;

}  // namespace levels
}  // namespace nhwc::cpu
