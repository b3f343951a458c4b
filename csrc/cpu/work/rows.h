// Rows of the source, packed for some results: what is inside of the array, and zeros around it. Shared like axes.h.
#pragma once

#include "cpu/work/axes.h"

namespace nhwc::cpu {

/// The positions of the source that are packed for `count` neighbouring results of an axis: all from the first to the
/// last that a tap sees or, where these are fewer, those of each tap, tap after tap. So padding is packed only if it is
/// between what taps see. Segments are what is packed without a gap: one, or one for each tap.
struct PackedAxis {
  std::int64_t source, begin, stride, dilation;  // as in `TapAxis`
  std::int64_t segments, length;                 // of a segment, in positions
  std::int64_t step, tap_step, source_step;      // from result to result, tap to tap, and position to position

  std::int64_t positions() const { return segments * length; }

  /// Returns the source of a position that is packed for results from `first` on. It may be outside of the array.
  std::int64_t source_of(std::int64_t first, std::int64_t position) const {
    const std::int64_t segment = segments == 1 ? 0 : position / length;
    return begin + first * stride + segment * dilation + (position - segment * length) * source_step;
  }
};

inline PackedAxis packed_by_tap(const TapAxis& axis, std::int64_t count) {
  return {axis.source, axis.begin, axis.stride, axis.dilation, axis.taps, count, 1, count, axis.stride};
}

inline PackedAxis packed_axis(const TapAxis& axis, std::int64_t count) {
  const std::int64_t all = axis.taps == 0 ? 0 : (count - 1) * axis.stride + (axis.taps - 1) * axis.dilation + 1;
  if (axis.taps * count < all) return packed_by_tap(axis, count);
  return {axis.source, axis.begin, axis.stride, axis.dilation, 1, all, axis.stride, axis.dilation, 1};
}

/// The positions of a segment: those of `inside` are in the array, the first of them at `source`, and the others,
/// `source_step` after each other, follow. Positions before and after `inside` are zeros.
struct Segment {
  Range inside;
  std::int64_t source;
};

/// Returns a segment that is packed for results from `first` on.
inline Segment segment_of(const PackedAxis& axis, std::int64_t first, std::int64_t segment) {
  const std::int64_t start = axis.begin + first * axis.stride + segment * axis.dilation;
  const Range inside = indexes_within(start, axis.source_step, axis.length, 0, axis.source);
  return {inside, start + inside.begin * axis.source_step};
}

/// Returns the index of a row in an array of `count` axes above it, or -1 if the row is outside of the array. Positions
/// are packed for results from `first` on.
inline std::int64_t source_row(const PackedAxis* axes, int count, const std::int64_t* first,
                               const std::int64_t* positions) {
  std::int64_t row = 0;
  for (int axis = 0; axis < count; ++axis) {
    const std::int64_t index = axes[axis].source_of(first[axis], positions[axis]);
    if (index < 0 || index >= axes[axis].source) return -1;
    row = row * axes[axis].source + index;
  }
  return row;
}

}  // namespace nhwc::cpu
