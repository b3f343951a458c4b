// Softmax and log-softmax of pixels, compiled for one instruction set. Uses neither torch nor code of the standard
// library, like filter_kernels.h.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// The pixels of a plane are a multiple of this many.
constexpr std::int64_t softmax_pixels = 16;
constexpr std::int64_t most_softmax_channels = 64;

/// Planes are `[channels, pixels]`, of floats.
struct SoftmaxKernels {
  /// Replaces values by their softmax over the channels, or by its logarithm.
  void (*softmax)(float* planes, std::int64_t channels, std::int64_t pixels);
  void (*log_softmax)(float* planes, std::int64_t channels, std::int64_t pixels);

  /// Replace gradients of the output by those of the input.
  void (*softmax_gradient)(float* grad, const float* output, std::int64_t channels, std::int64_t pixels);
  void (*log_softmax_gradient)(float* grad, const float* output, std::int64_t channels, std::int64_t pixels);
};

}  // namespace nhwc::cpu
