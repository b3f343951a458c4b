// Softmax of many rows at once, compiled for one instruction set. Free of torch and of the standard library's code, as
// filter_kernels.h.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

struct SoftmaxKernels {
  using Index = std::int64_t;
  /// Of a block of rows that is transposed: a matrix of `channels` x `rows`, each column of which is a row of its own.
  /// In place.
  using OfColumns = void (*)(float* values, Index channels, Index rows);
  /// Of dense rows that fill registers: of 32 channels at least, and of `longest_row` at most.
  using Forward = void (*)(const void* inputs, void* outputs, Index channels, Index rows);
  /// From the gradients of the outputs to those of the inputs, of dense rows.
  using Backward = void (*)(const void* gradients, const void* outputs, void* to, Index channels, Index rows);
  template <typename Kernel>
  struct ByType {
    Kernel of_float, of_half, of_bfloat16;
  };
  struct ByLogarithm {
    OfColumns of_columns;
    ByType<Forward> forward;
    ByType<Backward> backward;
  };

  ByLogarithm softmax, log_softmax;
  Index longest_row;
};

namespace levels {

extern const SoftmaxKernels softmax_baseline;
extern const SoftmaxKernels softmax_avx2;
extern const SoftmaxKernels softmax_avx512;
extern const SoftmaxKernels softmax_neon;

}  // namespace levels
}  // namespace nhwc::cpu
