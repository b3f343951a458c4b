// Resampling on a GPU: padding and interpolation as sums of rows, and how the work is cut into blocks. A row is all
// channels of a pixel or voxel.
//
// Each axis has taps: for each output index the input indices that it is the sum of, and their weights. An output row
// is the sum over the taps of all axes, and a gradient the same with the transposed taps. Taps are computed, so that
// nothing has to be in a GPU's memory before a kernel runs: by the arithmetic of PyTorch's CUDA kernels, and those of
// the transpose by asking the forward.
//
// Needs C++17 and no other library, CUDA's included.
#pragma once

#include <math.h>

#include <algorithm>
#include <cstdint>

#include "cuda/norm_plan.h"
#include "torch_nhwc/cuda/launch.h"

namespace nhwc::cuda {

enum class ResampleMode : std::uint8_t {
  reflect,
  replicate,
  circular,
  nearest,
  nearest_exact,
  linear,
  align_corners,  ///< linear, with the corners of input and output aligned
};
constexpr int resample_modes = 7;

NHWC_HOST_DEVICE constexpr bool is_padding(ResampleMode mode) { return mode <= ResampleMode::circular; }
NHWC_HOST_DEVICE constexpr bool is_linear(ResampleMode mode) { return mode >= ResampleMode::linear; }

/// One axis of the forward.
struct ResampleAxis {
  /// The first input index of an output index, its weight, and that of the next index, if there is one.
  template <typename Real>
  struct Taps {
    std::int32_t first;
    Real weight, next_weight;
    bool has_next;
  };

  ResampleMode mode;
  std::int32_t in, out;  ///< sizes
  std::int32_t before;   ///< the padding
  double scale;          ///< of an interpolation: the input's step for a step of the output

  template <typename Real>
  NHWC_HOST_DEVICE Taps<Real> taps(std::int32_t to) const {
    const std::int32_t last = in - 1, at = to - before;
    switch (mode) {
      case ResampleMode::reflect: return single<Real>(last - distance(last, distance(at, 0)));
      case ResampleMode::replicate: return single<Real>(at < 0 ? 0 : at < last ? at : last);
      case ResampleMode::circular: return single<Real>(at < 0 ? at + in : at < in ? at : at - in);
      case ResampleMode::nearest: return nearest<Real>(static_cast<float>(to));
      case ResampleMode::nearest_exact: return nearest<Real>(static_cast<float>(to) + 0.5f);
      default: break;
    }
    const auto step = static_cast<Real>(scale);
    Real source = step * static_cast<Real>(to);
    if (mode == ResampleMode::linear) source = fused(step, static_cast<Real>(to) + Real(0.5), Real(-0.5));
    if (!(source > 0)) source = 0;
    if (!(source < static_cast<Real>(last))) return single<Real>(last);
    const auto first = static_cast<std::int32_t>(source);
    const Real part = source - static_cast<Real>(first);
    return {first, 1 - part, part, true};
  }

  /// Whether the output indices of an input index may be in three places.
  NHWC_HOST_DEVICE bool is_folded() const { return mode == ResampleMode::reflect || mode == ResampleMode::circular; }

  /// Returns in which of three places an output index may have `from` as its tap, -1 for one that another place has.
  NHWC_HOST_DEVICE std::int32_t folded(std::int32_t from, std::int32_t place) const {
    const std::int32_t middle = before + from;
    if (mode == ResampleMode::circular) return middle + (place - 1) * in;
    if (place == 1) return from == 0 ? -1 : middle;
    return place == 0 ? before - from : from == in - 1 ? -1 : before + 2 * (in - 1) - from;
  }

  /// The output indices among which those are that have one of `count` input indices as a tap, unless it is folded.
  struct Range {
    std::int32_t begin, end;
  };
  NHWC_HOST_DEVICE Range range(std::int32_t from, std::int32_t count) const {
    Range found{before + from, before + from + count};
    if (!is_padding(mode)) {
      // Generous, since the forward says which are right; a step of 0 is one output.
      const auto step = static_cast<float>(scale);
      const float low = (static_cast<float>(from) - 1.5f) / step - 1,
                  high = (static_cast<float>(from + count) + 1) / step + 3;
      found.begin = low > 0 ? low < static_cast<float>(out) ? static_cast<std::int32_t>(low) : out : 0;
      found.end = high < static_cast<float>(out) ? static_cast<std::int32_t>(high) : out;
    }
    if (from == 0) found.begin = 0;
    if (from + count >= in) found.end = out;
    return found;
  }

  /// Calls `visit(to, weight)` for each output index that has `from` among its taps, in one order.
  template <typename Real, typename Visit>
  NHWC_HOST_DEVICE void visit_transposed(std::int32_t from, const Visit& visit) const {
    const Range all = is_folded() ? Range{0, 3} : range(from, 1);
    for (std::int32_t i = all.begin; i < all.end; ++i) {
      const std::int32_t to = is_folded() ? folded(from, i) : i;
      if (to < 0 || to >= out) continue;
      const Taps<Real> found = taps<Real>(to);
      if (found.first == from) visit(to, found.weight);
      if (found.has_next && found.first + 1 == from) visit(to, found.next_weight);
    }
  }

  /// Returns how many indices of the other side are asked at most for `count` indices of the result.
  std::uint32_t most_asked(bool is_transposed, std::int32_t count) const {
    if (!is_transposed) return count * (is_linear(mode) && in > 1 ? 2 : 1);
    if (is_folded()) return count * 3;
    std::int32_t most = 0;
    for (std::int32_t from = 0; from < in; from += count) {
      const Range asked = range(from, std::min(count, in - from));
      most = std::max(most, asked.end - asked.begin);
    }
    return most;
  }

 private:
  NHWC_HOST_DEVICE static std::int32_t distance(std::int32_t a, std::int32_t b) { return a < b ? b - a : a - b; }
  NHWC_HOST_DEVICE static float fused(float a, float b, float c) { return fmaf(a, b, c); }
  NHWC_HOST_DEVICE static double fused(double a, double b, double c) { return fma(a, b, c); }

  template <typename Real>
  NHWC_HOST_DEVICE static Taps<Real> single(std::int32_t from) {
    return {from, 1, 0, false};
  }
  template <typename Real>
  NHWC_HOST_DEVICE Taps<Real> nearest(float position) const {
    const float source = position * static_cast<float>(scale);
    return single<Real>(source < static_cast<float>(in - 1) ? static_cast<std::int32_t>(source) : in - 1);
  }
};

/// Divides numbers below 2^31 by one number.
struct Reciprocal {
  std::uint32_t divisor = 1, multiplier = 0x80000001, shift = 31;

  Reciprocal() = default;
  explicit Reciprocal(std::uint32_t by) : divisor(by) {
    while ((std::uint64_t{1} << (shift - 31)) < by) ++shift;
    multiplier = static_cast<std::uint32_t>((std::uint64_t{1} << shift) / by + 1);
  }
  NHWC_HOST_DEVICE std::uint32_t quotient(std::uint32_t dividend) const {
    return static_cast<std::uint32_t>(std::uint64_t{dividend} * multiplier >> shift);
  }
};

constexpr unsigned resample_threads = 256;
constexpr int summed_types = 4;         // the first ones of `NormType`
constexpr unsigned copied_vectors = 4;  // of a thread

/// Returns of how many rows along the first axis a thread sums a vector at a time. Rows of an interpolation share taps.
NHWC_HOST_DEVICE constexpr unsigned summed_rows_of(ResampleMode mode) { return is_linear(mode) ? 4 : 1; }

/// How blocks share the rows of a result. Single taps of weight 1 copy rows, in vectors of as many bytes as rows and
/// memory allow, from the first to the last. Sums take tiles of all axes, in vectors of 16 bytes or single elements.
struct ResamplePlan {
  ResampleAxis axes[3];
  bool is_transposed, is_copy;
  std::uint32_t bytes;    ///< of a vector
  std::uint32_t samples;  ///< of one launch
  Reciprocal vectors;     ///< of a row
  Reciprocal sizes[3];    ///< of the result
  // Of sums:
  Reciprocal width, vector_tiles;  ///< the vectors of a row in a tile, and the tiles of a row
  Reciprocal tiles[3];
  std::uint32_t shifts[3];  ///< a tile has `1 << shift` indices
  std::uint32_t most[3];    ///< taps of an index; of the first axis those of a tile
  bool can_launch;

  std::int32_t to(int axis) const { return is_transposed ? axes[axis].in : axes[axis].out; }
  NHWC_HOST_DEVICE std::int32_t from(int axis) const { return is_transposed ? axes[axis].out : axes[axis].in; }
  std::uint64_t rows() const { return std::uint64_t{1} * to(0) * to(1) * to(2); }
  std::uint64_t input_rows() const { return std::uint64_t{1} * from(0) * from(1) * from(2); }
  NHWC_HOST_DEVICE std::uint32_t items() const { return width.divisor << (shifts[1] + shifts[2]); }
  std::uint64_t blocks() const {
    constexpr unsigned of_a_block = resample_threads * copied_vectors;
    if (is_copy) return (samples * rows() * vectors.divisor + of_a_block - 1) / of_a_block;
    return std::uint64_t{samples} * tiles[0].divisor * tiles[1].divisor * tiles[2].divisor * vector_tiles.divisor;
  }
  /// The taps of a tile: of the last two axes with how many an index has, of the first for all of its indices.
  std::uint32_t shared_bytes(std::uint32_t real_bytes) const {
    std::uint32_t bytes = most[0] * (summed_rows_of(axes[0].mode) * real_bytes + 8);
    for (int axis = 1; axis < 3; ++axis) bytes += (most[axis] * 2 * real_bytes + 4) << shifts[axis];
    return is_copy ? 0 : bytes;
  }
};

/// Returns the largest vector that divides a row and all addresses.
inline std::uint32_t vector_bytes_of(std::uint64_t row_bytes, std::uint64_t addresses) {
  const std::uint64_t all = row_bytes | addresses | 16;
  return static_cast<std::uint32_t>(all & (~all + 1));
}

/// Returns a plan for rows of `channels` elements of `element_bytes`, for as many of the samples as one launch may
/// have.
/// @param addresses  of input and output, combined by "or".
inline ResamplePlan plan_resampling(const ResampleAxis (&axes)[3], bool is_transposed, std::uint64_t samples,
                                    std::uint64_t channels, std::uint32_t element_bytes, std::uint64_t addresses) {
  constexpr std::uint64_t most_vectors = std::uint64_t{1} << 31, most_shared_bytes = 40 << 10;
  ResamplePlan plan{};
  std::copy(axes, axes + 3, plan.axes);
  plan.is_transposed = is_transposed;
  plan.is_copy = !is_transposed && !is_linear(axes[0].mode);
  plan.bytes = vector_bytes_of(channels * element_bytes, addresses);
  if (!plan.is_copy && plan.bytes < 16) plan.bytes = element_bytes;
  const std::uint64_t vectors = channels * element_bytes / plan.bytes;
  const std::uint64_t of_sample = std::max(plan.rows(), plan.input_rows()) * vectors;
  if (of_sample == 0 || of_sample >= most_vectors || samples == 0) return plan;
  plan.samples = static_cast<std::uint32_t>(std::min(samples, (most_vectors - 1) / of_sample));
  plan.vectors = Reciprocal(static_cast<std::uint32_t>(vectors));
  for (int axis = 0; axis < 3; ++axis) plan.sizes[axis] = Reciprocal(plan.to(axis));
  plan.can_launch = true;
  if (plan.is_copy) return plan;

  // A thread has several vectors where there are many: of rows that share taps, or one after the other.
  constexpr std::uint64_t enough_threads = 1000 * resample_threads;
  const unsigned summed_rows = summed_rows_of(axes[0].mode);
  const std::uint64_t all = samples * plan.rows() * vectors;
  const std::uint32_t items = resample_threads * (summed_rows == 1 && all >= 4 * enough_threads ? 4 : 1);
  plan.width = Reciprocal(static_cast<std::uint32_t>(std::min<std::uint64_t>(vectors, 1024)));
  plan.vector_tiles = Reciprocal(static_cast<std::uint32_t>((vectors + plan.width.divisor - 1) / plan.width.divisor));
  const auto grows = [&](int axis) { return (std::int64_t{1} << plan.shifts[axis]) < plan.to(axis); };
  while ((2u << plan.shifts[0]) <= summed_rows && grows(0) && all >> (plan.shifts[0] + 1) >= enough_threads) {
    ++plan.shifts[0];
  }
  while (plan.items() * 2 <= items && (grows(1) || grows(2))) {
    ++plan.shifts[grows(2) && (!grows(1) || plan.shifts[2] <= plan.shifts[1]) ? 2 : 1];
  }
  const auto find_most = [&] {
    for (int axis = 0; axis < 3; ++axis) {
      plan.most[axis] = axes[axis].most_asked(is_transposed, axis == 0 ? 1 << plan.shifts[0] : 1);
    }
  };
  find_most();
  while (plan.shared_bytes(8) > most_shared_bytes / 4 && plan.shifts[0] + plan.shifts[1] + plan.shifts[2] > 0) {
    const auto bytes_of = [&](int axis) { return plan.shifts[axis] == 0 ? 0 : plan.most[axis] << plan.shifts[axis]; };
    --plan.shifts[bytes_of(0) >= std::max(bytes_of(1), bytes_of(2)) ? 0 : bytes_of(1) >= bytes_of(2) ? 1 : 2];
    find_most();
  }
  for (int axis = 0; axis < 3; ++axis) {
    const std::uint32_t tile = 1u << plan.shifts[axis];
    plan.tiles[axis] = Reciprocal((plan.to(axis) + tile - 1) / tile);
  }
  plan.can_launch = plan.shared_bytes(8) <= most_shared_bytes;
  return plan;
}

struct ResampleArguments {
  ResamplePlan plan;
  const void* input;
  void* out;
};

}  // namespace nhwc::cuda
