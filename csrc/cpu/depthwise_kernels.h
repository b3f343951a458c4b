// Depthwise convolutions of channels-last activations, compiled for one instruction set. Uses neither torch nor code of
// the standard library, like filter_kernels.h.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// One axis of a correlation. Destination `first + i * step`, for `i` below `count`, is the sum over `k` below `taps`
/// of source `begin + i * stride + k * dilation`, which is zero outside of the array, times weight `first_tap + k *
/// tap_step`.
struct DepthwiseAxis {
  std::int64_t source, destination, kernel;  // sizes of the arrays
  std::int64_t first, step, count;
  std::int64_t begin, stride, dilation;
  std::int64_t first_tap, tap_step, taps;
};

/// Axes are depth, height and width. The forward reads source channel `channel / repeats` for a channel of the
/// destination. The input gradient reads the source channels `channel * parts + part`, for all parts.
struct DepthwiseCorrelation {
  DepthwiseAxis axes[3];
  std::int64_t source_channels, destination_channels, repeats, parts;
};

/// The values of `i` along each axis, and the channels of the destination, at most as many as a register has lanes.
struct DepthwiseBlock {
  std::int64_t begin[3], size[3];
  std::int64_t channel, channels;
};

/// Numbers are floats, or doubles for doubles. Sources and destinations are those of one sample. The caller may read
/// `lanes` numbers from each channel of weights and biases on.
struct DepthwiseKernels {
  std::int64_t lanes;  // numbers of a register

  /// Returns the numbers of scratch memory that a block needs, in both functions below.
  std::int64_t (*scratch_size)(const DepthwiseCorrelation& correlation, const DepthwiseBlock& block);

  /// Writes a block. The weight is `[parts, kernel, channels]`, of numbers; the bias may be null.
  void (*correlate)(const DepthwiseCorrelation& correlation, const DepthwiseBlock& block, const void* source,
                    void* destination, const void* weight, const void* bias, void* scratch);

  /// Adds a block's weight gradient, `[kernel, lanes]`, and then its bias gradient, `[lanes]`, to `sums`. `grad` is the
  /// gradient of the destination.
  void (*add_weight_gradient)(const DepthwiseCorrelation& correlation, const DepthwiseBlock& block, const void* source,
                              const void* grad, void* sums, void* scratch);
};

/// For doubles, floats, halves and bfloat16s.
struct DepthwiseKernelsByType {
  DepthwiseKernels of_double, of_float, of_half, of_bfloat16;
};

namespace isa {

extern const DepthwiseKernelsByType depthwise_baseline;
extern const DepthwiseKernelsByType depthwise_avx2;
extern const DepthwiseKernelsByType depthwise_avx512;
extern const DepthwiseKernelsByType depthwise_neon;

}  // namespace isa
}  // namespace nhwc::cpu
