// Products of pixels of few channels, compiled for one instruction set. Uses neither torch nor code of the standard
// library, like filter_kernels.h.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// The most channels that are few, and the most channels.
constexpr std::int64_t most_few = 4, most_pointwise_channels = 256;

/// Activations are `[pixels, channels]`. There is a kernel for each number of few channels, from 1 on, and none for
/// doubles.
struct PointwiseKernels {
  using Multiply = void (*)(const void* input, std::int64_t pixels, std::int64_t many, const float* weights,
                            const float* bias, void* out);

  Multiply reduce[most_few];  ///< few outputs of many inputs, by weights `[outputs, inputs]`
  Multiply spread[most_few];  ///< many outputs of few inputs, by weights `[inputs, outputs]`
};

}  // namespace nhwc::cpu
