// Depthwise convolutions of channels-last activations, compiled for one instruction set. Uses neither torch nor code of
// the standard library, like filter_kernels.h.
#pragma once

#include "cpu/work/axes.h"

namespace nhwc::cpu {

/// Axes are depth, height and width. Of one sample, the source is `[D, H, W, source_channels]`, the result
/// `[D, H, W, result_channels]`. The forward reads source channel `channel / repeats` for a channel of the result. The
/// input gradient reads the source channels `channel * parts + part`, for all parts.
struct DepthwiseCorrelation {
  TapAxis axes[3];
  std::int64_t source_channels, result_channels, repeats, parts;
};

/// Some results along each axis, as their indexes there, and channels, at most as many as a register has lanes.
struct DepthwiseBlock {
  std::int64_t begin[3], size[3];
  std::int64_t channel, channels;
};

/// Numbers are floats, or doubles for doubles. From each channel of weights and biases on, `lanes` numbers are
/// readable.
struct DepthwiseKernels {
  std::int64_t lanes;  // numbers of a register

  /// Returns the numbers of scratch memory that a block needs, in both functions below.
  std::int64_t (*scratch_size)(const DepthwiseCorrelation& correlation, const DepthwiseBlock& block);

  /// Writes a block. The weight is `[parts, kernel..., channels]`, of numbers; the bias may be null.
  void (*correlate)(const DepthwiseCorrelation& correlation, const DepthwiseBlock& block, const void* source,
                    void* result, const void* weight, const void* bias, void* scratch);

  /// Adds a block's weight gradient, `[kernel..., lanes]`, and then its bias gradient, `[lanes]`, to `sums`. `grad` is
  /// the gradient of the result.
  void (*add_weight_gradient)(const DepthwiseCorrelation& correlation, const DepthwiseBlock& block, const void* source,
                              const void* grad, void* sums, void* scratch);
};

}  // namespace nhwc::cpu
