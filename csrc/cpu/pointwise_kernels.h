// Products of pixels of few channels, compiled for one instruction set. Uses neither torch nor code of the standard
// library, like filter_kernels.h.
#pragma once

#include "cpu/work/planes.h"

namespace nhwc::cpu {

/// The most channels that are few, and the most channels.
constexpr std::int64_t most_few = 4, most_pointwise_channels = 256;

/// Planes are `[channels, pixels]`, of floats.
struct PointwiseKernels {
  std::int64_t lanes;  // floats of a register

  /// Writes the outputs of input planes. Weights are `[outputs, inputs]`.
  void (*multiply)(const float* input, std::int64_t pixels, std::int64_t inputs, std::int64_t outputs,
                   const float* weights, const float* bias, float* out);

  /// Adds the products of planes of gradients and of inputs to `sums`, `[outputs, inputs + 1, lanes]`. One more input
  /// is 1, for the bias.
  void (*accumulate)(const float* grad, const float* input, std::int64_t pixels, std::int64_t inputs,
                     std::int64_t outputs, float* sums);
};

}  // namespace nhwc::cpu
