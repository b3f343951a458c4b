// Products of pixels of few channels over channels-last memory, compiled for one instruction set. Uses neither torch
// nor code of the standard library, like filter_kernels.h.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// The most channels that are few, and the most channels.
constexpr std::int64_t most_few = 4, most_pointwise_channels = 256;

/// For one element type. Pixels are dense rows of elements; numbers are floats.
struct PointwiseKernels {
  /// Computes the outputs of pixels. The inputs or the outputs are few, or both. Weights are `[outputs, inputs]`.
  void (*multiply)(const void* input, std::int64_t pixels, std::int64_t inputs, std::int64_t outputs,
                   const float* weights, const float* bias, void* out);

  /// Adds the products of gradients, which are few, and of inputs to `sums`, which are `[outputs, inputs]`, and the
  /// gradients to `bias`.
  void (*accumulate)(const void* grad, const void* input, std::int64_t pixels, std::int64_t inputs,
                     std::int64_t outputs, float* sums, float* bias);
};

/// For floats, halves and bfloat16s.
struct PointwiseKernelsByType {
  PointwiseKernels of_float, of_half, of_bfloat16;
};

namespace isa {

extern const PointwiseKernelsByType pointwise_baseline;
extern const PointwiseKernelsByType pointwise_avx2;
extern const PointwiseKernelsByType pointwise_avx512;
extern const PointwiseKernelsByType pointwise_neon;

}  // namespace isa
}  // namespace nhwc::cpu
