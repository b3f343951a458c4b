// The axes of a convolution, as the taps of its kernel see them. Kernels and drivers share it: like the kernels'
// headers it uses neither torch nor code of the standard library, and is included before a file chooses its instruction
// set.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// The sizes of a convolution over channels-last memory. Arrays are along depth, height and width; in 2D the depth
/// is 1. The input is `[samples, input..., groups * inputs]`, the output `[samples, output..., groups * outputs]`, the
/// weight
/// `[groups * outputs, kernel..., inputs]`, all dense. Tap `k` of output position `o` sees input position
/// `o * stride - padding + k * dilation`, or zero outside of it.
struct ConvolutionSizes {
  std::int64_t samples;
  std::int64_t groups, inputs, outputs;  // inputs and outputs of one group
  std::int64_t input[3], output[3], kernel[3], stride[3], padding[3], dilation[3];

  std::int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
};

/// The indexes from `begin` to before `end`.
struct Range {
  std::int64_t begin, end;
  std::int64_t size() const { return end - begin; }
};

/// Returns which indexes below `count` have `start + index * step` from `low` to before `high`.
inline Range indexes_within(std::int64_t start, std::int64_t step, std::int64_t count, std::int64_t low,
                            std::int64_t high) {
  const auto steps = [=](std::int64_t distance) {
    if (distance <= 0) return std::int64_t{0};
    return step == 1 ? distance : (distance + step - 1) / step;  // most steps are 1, and a division is slow
  };
  const std::int64_t begin = steps(low - start), end = steps(high - start);
  const std::int64_t last = end < count ? end : count;
  return {begin < last ? begin : last, last};
}

/// An axis under taps. Result `first + i * step`, for `i` below `count`, is the sum over `k` below `taps` of source
/// `begin + i * stride + k * dilation`, which is zero outside of the array, times weight `first_tap + k * tap_step`.
struct TapAxis {
  std::int64_t source, results, kernel;  // sizes of the arrays
  std::int64_t count, taps;
  std::int64_t begin, stride, dilation;
  std::int64_t first = 0, step = 1, first_tap = 0, tap_step = 1;

  std::int64_t result_of(std::int64_t i) const { return first + i * step; }
  std::int64_t weight_of(std::int64_t k) const { return first_tap + k * tap_step; }

  /// Returns the taps of result `i` that see a source inside of the array.
  Range taps_inside(std::int64_t i) const { return indexes_within(begin + i * stride, dilation, taps, 0, source); }

  /// Returns the results from `i` on, counted from there, of which a tap from `k` to before `k + tap_count` may see a
  /// source inside of the array.
  Range results_inside(std::int64_t i, std::int64_t result_count, std::int64_t k, std::int64_t tap_count) const {
    return indexes_within(begin + i * stride + k * dilation, stride, result_count, -(tap_count - 1) * dilation, source);
  }
};

/// Returns an axis of the forward: the source is the input.
inline TapAxis forward_axis(const ConvolutionSizes& sizes, int axis) {
  return {.source = sizes.input[axis],
          .results = sizes.output[axis],
          .kernel = sizes.kernel[axis],
          .count = sizes.output[axis],
          .taps = sizes.kernel[axis],
          .begin = -sizes.padding[axis],
          .stride = sizes.stride[axis],
          .dilation = sizes.dilation[axis]};
}

/// Returns the inputs `phase + i * stride` of an axis as sums of gradients: the source is the gradient of the output.
/// The taps that see these inputs are a stride, or a divisor of it, apart, and their gradients have no stride. Taps
/// descend, so that gradients ascend.
inline TapAxis gradient_axis(const ConvolutionSizes& sizes, int axis, std::int64_t phase) {
  const std::int64_t stride = sizes.stride[axis], dilation = sizes.dilation[axis];
  const std::int64_t shifted = phase + sizes.padding[axis];
  std::int64_t divisor = stride, rest = dilation % stride;  // by Euclid
  while (rest != 0) {
    const std::int64_t next = divisor % rest;
    divisor = rest, rest = next;
  }
  const std::int64_t tap_step = stride / divisor;
  std::int64_t taps = 0, last_tap = 0;
  for (std::int64_t tap = 0; tap < sizes.kernel[axis]; ++tap) {
    if ((shifted - tap * dilation) % stride == 0) ++taps, last_tap = tap;
  }
  return {.source = sizes.output[axis],
          .results = sizes.input[axis],
          .kernel = sizes.kernel[axis],
          .count = (sizes.input[axis] - phase + stride - 1) / stride,
          .taps = taps,
          .begin = (shifted - last_tap * dilation) / stride,
          .stride = 1,
          .dilation = dilation * tap_step / stride,
          .first = phase,
          .step = stride,
          .first_tap = last_tap,
          .tap_step = -tap_step};
}

/// An axis of values that are read as they are.
inline TapAxis plain_axis(std::int64_t size) {
  return {
      .source = size, .results = size, .kernel = 1, .count = size, .taps = 1, .begin = 0, .stride = 1, .dilation = 1};
}

}  // namespace nhwc::cpu
