// The inner loops of a convolution's weight gradient, compiled for one instruction set. Uses neither torch nor code of
// the standard library, like filter_kernels.h.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// Output positions and the input under their taps, packed: numbers are floats, or doubles for doubles.
///
/// The gradient has `outputs` channels in groups of `outputs_at_once`, each `[capacity][outputs_at_once]`. The last
/// group has half of that if this is enough. Output position `column` of row `row` has its first input number at
/// `rows[row] + column * step`. From there, register `r` of input numbers is at `offsets[r]`.
struct PackedBlock {
  const void *input, *grad;
  const std::int64_t* rows;
  std::int64_t row_count, columns, step;
  const std::int64_t* offsets;
  std::int64_t registers;
  std::int64_t outputs, capacity;
};

struct WeightGradientKernels {
  std::int64_t lanes;  // numbers of a register
  std::int64_t outputs_at_once;

  /// Packs `width` elements at `from` and after each `stride` elements, `count` times, as numbers after each
  /// `to_stride` numbers. Without gaps between these, up to a register more is written after the last. Nothing is read
  /// from `end` on: what is packed for that has any value.
  void (*pack)(const void* from, const void* end, std::int64_t stride, std::int64_t count, std::int64_t width, void* to,
               std::int64_t to_stride);

  /// Adds to `sums`, `[outputs][registers][lanes]`, the products of gradient and input, summed over the positions. The
  /// outputs are rounded up to a multiple of `outputs_at_once`.
  void (*multiply)(const PackedBlock& block, void* sums);

  /// Adds to `sums`, `[outputs]` rounded up in the same way, the gradient, summed over the positions.
  void (*sum)(const PackedBlock& block, void* sums);

  /// Casts and writes `rows` rows of `count` sums. Both sides have a stride.
  void (*write)(const void* sums, std::int64_t sums_stride, std::int64_t rows, std::int64_t count, void* out,
                std::int64_t out_stride);
};

}  // namespace nhwc::cpu
