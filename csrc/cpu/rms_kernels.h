// RMS norm over the channels of channels-last rows, compiled for one instruction set. Uses neither torch nor code of
// the standard library, like filter_kernels.h.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// Rows `[count, channels]`, and what they are multiplied by and added to: `weight` and `bias` are floats, of doubles
/// doubles, for each channel.
struct RmsRows {
  std::int64_t count, channels;
  const void *weight, *bias;
  double scale, eps;
};

/// out = activation(row * scale / max(length of the row, eps) * weight + bias).
struct RmsPasses {
  void (*forward)(const RmsRows& shape, const void* rows, void* out);

  /// Computes the gradient of the rows, and adds those of weight and bias, which are as these are. `scratch` has room
  /// for a row of such numbers. `out` may be null.
  void (*backward)(const RmsRows& shape, const void* grad, const void* rows, void* out, void* weight_sums,
                   void* bias_sums, void* scratch);
};

struct RmsKernels {
  RmsPasses alone, with_silu;
};

}  // namespace nhwc::cpu
