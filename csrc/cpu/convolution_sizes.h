// The sizes of a convolution over channels-last memory.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// Arrays are along depth, height and width; in 2D the depth is 1. The input is `[samples, input..., groups * inputs]`,
/// the output `[samples, output..., groups * outputs]`, the weight `[groups * outputs, kernel..., inputs]`, all dense.
/// Tap `k` of output position `o` sees input position `o * stride - padding + k * dilation`, or zero outside of it.
struct ConvolutionSizes {
  std::int64_t samples;
  std::int64_t groups, inputs, outputs;  // inputs and outputs of one group
  std::int64_t input[3], output[3], kernel[3], stride[3], padding[3], dilation[3];
};

}  // namespace nhwc::cpu
