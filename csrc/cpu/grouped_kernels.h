// The sums of a grouped convolution over channels-last memory, compiled for one instruction set. Uses neither torch nor
// code of the standard library, like filter_kernels.h.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// A tap of the kernel, by the numbers at which its first pixel and its weights begin.
struct GroupedTap {
  std::int64_t pixel, weight;
};

/// Neighbouring pixels of the output, and those channels of them that are summed together: all of one group, or all of
/// as many groups as fit into one register. "Numbers" are floats or, for doubles, doubles.
struct GroupedRow {
  std::int64_t pixels, inputs, channels;  ///< of the output; of one group of the input; of the output
  bool is_spread;                         ///< whether the channels are of several groups, see `spread`
  const GroupedTap* taps;
  std::int64_t tap_count;
  const void* source;     ///< numbers, `[tap, pixel, inputs]`, or `[tap, pixel, inputs, lanes]` if spread
  const void* weights;    ///< numbers, `[tap, inputs, channels]`, and a register more
  const void* bias;       ///< numbers, `[channels]`, and a register more
  void* out;              ///< elements
  std::int64_t out_step;  ///< elements from one pixel to the next
  void* sums;             ///< room for numbers, `[pixels, channels]` with the channels rounded up to registers
};

/// For one element type.
struct GroupedKernels {
  std::int64_t lanes;         ///< numbers in a register
  std::int64_t number_bytes;  ///< bytes of a number

  /// Casts rows of elements, `step` elements apart, to numbers, `out_step` numbers apart.
  void (*cast)(const void* rows, std::int64_t count, std::int64_t channels, std::int64_t step, void* out,
               std::int64_t out_step);

  /// Casts pixels of some groups, `step` elements apart, to `[count, inputs, lanes]`: a register has an input of each
  /// group, repeated for each of the group's outputs.
  void (*spread)(const void* pixels, std::int64_t count, std::int64_t groups, std::int64_t inputs, std::int64_t outputs,
                 std::int64_t step, void* out);

  /// Computes the row: the bias and the sum over taps and inputs.
  void (*sum)(const GroupedRow& row);
};

/// For doubles, floats, halves and bfloat16s.
struct GroupedKernelsByType {
  GroupedKernels of_double, of_float, of_half, of_bfloat16;
};

namespace isa {

extern const GroupedKernelsByType grouped_baseline;
extern const GroupedKernelsByType grouped_avx2;
extern const GroupedKernelsByType grouped_avx512;
extern const GroupedKernelsByType grouped_neon;

}  // namespace isa
}  // namespace nhwc::cpu
