// The work of one block of a GPU's threads in resampling, in phases with barriers between them, as in norm_blocks.h.
#pragma once

#include <cstdint>

#include "cuda/norm_blocks.h"
#include "cuda/resample_plan.h"

namespace nhwc::cuda {

/// Copies rows: a thread's vectors, which are those of consecutive threads in a row, are loaded together.
template <unsigned bytes, typename Access = DirectAccess>
class CopiedRows {
 public:
  NHWC_HOST_DEVICE CopiedRows(const ResampleArguments& arguments, std::uint32_t block, char*, Access access = {})
      : plan_(arguments.plan), input_(arguments.input), out_(arguments.out), access_(access), block_(block) {}

  template <typename All>
  NHWC_HOST_DEVICE void run(const All& all) const {
    all([&](std::uint32_t thread) {
      const std::uint32_t first = block_ * (resample_threads * copied_vectors) + thread;
      const std::uint32_t end = plan_.samples * plan_.sizes[0].divisor * plan_.sizes[1].divisor *
                                plan_.sizes[2].divisor * plan_.vectors.divisor;
      detail::Bits<bytes> loaded[copied_vectors];
      NHWC_UNROLL
      for (unsigned i = 0; i < copied_vectors; ++i) {
        const std::uint32_t vector = first + i * resample_threads;
        if (vector < end) loaded[i] = access_.template load<detail::Bits<bytes>>(at(input_, source(vector)));
      }
      NHWC_UNROLL
      for (unsigned i = 0; i < copied_vectors; ++i) {
        const std::uint32_t vector = first + i * resample_threads;
        if (vector < end) access_.store(const_cast<char*>(at(out_, vector)), loaded[i]);
      }
    });
  }

 private:
  NHWC_HOST_DEVICE static const char* at(const void* memory, std::uint32_t vector) {
    return static_cast<const char*>(memory) + std::uint64_t{vector} * bytes;
  }
  /// Splits a number into a quotient, which is returned, and a remainder, which stays.
  NHWC_HOST_DEVICE static std::uint32_t split(std::uint32_t& number, const Reciprocal& by) {
    const std::uint32_t quotient = by.quotient(number);
    number -= quotient * by.divisor;
    return quotient;
  }
  NHWC_HOST_DEVICE std::uint32_t source(std::uint32_t vector) const {
    std::uint32_t index2 = split(vector, plan_.vectors);  // of the row, of the line, of the plane, of the sample
    std::uint32_t index1 = split(index2, plan_.sizes[2]);
    std::uint32_t index0 = split(index1, plan_.sizes[1]);
    std::uint32_t row = split(index0, plan_.sizes[0]);
    const std::uint32_t indices[] = {index0, index1, index2};
    NHWC_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      row = row * plan_.axes[axis].in + plan_.axes[axis].template taps<float>(indices[axis]).first;
    }
    return row * plan_.vectors.divisor + vector;
  }

  const ResamplePlan& plan_;
  const void* input_;
  void* out_;
  Access access_;
  std::uint32_t block_;
};

/// Sums rows: the threads compute the taps of a tile, and then its vectors, one after the other.
template <NormType type, unsigned lanes, typename Access = DirectAccess>
class SummedRows {
 public:
  NHWC_HOST_DEVICE SummedRows(const ResampleArguments& arguments, std::uint32_t block, char* shared, Access access = {})
      : plan_(arguments.plan), input_(arguments.input), out_(arguments.out), access_(access), shared_(shared) {
    first_vector_ = remainder(block, plan_.vector_tiles) * plan_.width.divisor;
    NHWC_UNROLL
    for (int axis = 2; axis >= 0; --axis) first_[axis] = remainder(block, plan_.tiles[axis]) << plan_.shifts[axis];
    sample_ = block;
  }

  template <typename All>
  NHWC_HOST_DEVICE void run(const All& all) const {
    all([&](std::uint32_t thread) { list_taps(thread); });
    all([&](std::uint32_t thread) {
      const std::uint32_t items = plan_.width.divisor << (plan_.shifts[0] + plan_.shifts[1] + plan_.shifts[2]);
      for (std::uint32_t item = thread; item < items; item += resample_threads) sum(item);
    });
  }

 private:
  using Element = detail::NormElement<type>;
  using Real = typename Element::Real;
  static constexpr unsigned bytes = Element::bytes;
  using Vector = detail::Bits<bytes * lanes>;
  static constexpr unsigned in_flight = 4;

  /// Divides a number, which becomes the quotient, and returns the remainder.
  NHWC_HOST_DEVICE static std::uint32_t remainder(std::uint32_t& number, const Reciprocal& by) {
    const std::uint32_t all = number;
    number = by.quotient(all);
    return all - number * by.divisor;
  }

  // Shared memory: the weights of all axes, the input's vectors, and the counts. The n-th taps of a tile's indices are
  // neighbours, so that threads find them in different banks.
  NHWC_HOST_DEVICE std::uint32_t taps_before(int axis) const {
    std::uint32_t taps = 0;
    NHWC_UNROLL
    for (int before = 0; before < axis; ++before) taps += plan_.taps_of_tile(before);
    return taps;
  }
  NHWC_HOST_DEVICE std::uint32_t weight_at(int axis, std::uint32_t tap, std::uint32_t index) const {
    return (taps_before(axis) + (tap << plan_.shifts[axis]) + index) * static_cast<std::uint32_t>(sizeof(Real));
  }
  NHWC_HOST_DEVICE std::uint32_t vector_at(int axis, std::uint32_t tap, std::uint32_t index) const {
    return taps_before(3) * static_cast<std::uint32_t>(sizeof(Real)) +
           (taps_before(axis) + (tap << plan_.shifts[axis]) + index) * 4;
  }
  NHWC_HOST_DEVICE std::uint32_t count_at(int axis, std::uint32_t index) const {
    std::uint32_t place = taps_before(3) * (static_cast<std::uint32_t>(sizeof(Real)) + 4) + index * 4;
    NHWC_UNROLL
    for (int before = 0; before < axis; ++before) place += 4u << plan_.shifts[before];
    return place;
  }

  NHWC_HOST_DEVICE std::uint32_t to(int axis) const { return plan_.sizes[axis].divisor; }

  /// Lists the taps of each index of the tile, by one thread each.
  NHWC_HOST_DEVICE void list_taps(std::uint32_t thread) const {
    std::uint32_t before = 0, stride = plan_.vectors.divisor;
    NHWC_UNROLL
    for (int axis = 2; axis >= 0; --axis) {
      const std::uint32_t tile = 1u << plan_.shifts[axis];
      // Those of the axes are of neighbouring threads, and a tile's may be more than there are threads.
      for (std::uint32_t index = (thread + resample_threads - before % resample_threads) % resample_threads;
           index < tile; index += resample_threads) {
        list_taps(axis, index, stride);
      }
      before += tile;
      stride *= plan_.from(axis);
    }
  }
  NHWC_HOST_DEVICE void list_taps(int axis, std::uint32_t index, std::uint32_t stride) const {
    std::uint32_t count = 0;
    const auto add = [&](std::int32_t from, Real weight) {
      if (count == plan_.most[axis]) return;
      access_.store_shared(shared_, weight_at(axis, count, index), weight);
      access_.store_shared(shared_, vector_at(axis, count, index), static_cast<std::uint32_t>(from) * stride);
      ++count;
    };
    const std::uint32_t to_index = first_[axis] + index;
    if (to_index < to(axis)) {
      const ResampleAxis& along = plan_.axes[axis];
      if (plan_.is_transposed) {
        along.template visit_transposed<Real>(to_index, add);
      } else {
        const auto taps = along.template taps<Real>(to_index);
        add(taps.first, taps.weight);
        if (taps.has_next) add(taps.first + 1, taps.next_weight);
      }
    }
    access_.store_shared(shared_, count_at(axis, index), count);
  }

  NHWC_HOST_DEVICE Real weight(int axis, std::uint32_t tap, std::uint32_t index) const {
    return access_.template load_shared<Real>(shared_, weight_at(axis, tap, index));
  }
  NHWC_HOST_DEVICE std::uint32_t vector(int axis, std::uint32_t tap, std::uint32_t index) const {
    return access_.template load_shared<std::uint32_t>(shared_, vector_at(axis, tap, index));
  }

  /// Walks over the taps of an output row, those of the last axis first.
  struct Walk {
    const SummedRows& rows;
    const std::uint32_t (&indices)[3], (&counts)[3];
    std::uint32_t tap0 = 0, tap1 = 0, tap2 = 0, line = 0;
    Real of_line = 0;

    NHWC_HOST_DEVICE Walk(const SummedRows& all, const std::uint32_t (&of)[3], const std::uint32_t (&those)[3])
        : rows(all), indices(of), counts(those) {
      if (counts[0] * counts[1] * counts[2] > 0) enter_line();
    }
    NHWC_HOST_DEVICE std::uint32_t vector() const { return line + rows.vector(2, tap2, indices[2]); }
    NHWC_HOST_DEVICE Real weight() const { return of_line * rows.weight(2, tap2, indices[2]); }
    NHWC_HOST_DEVICE void advance() {
      if (++tap2 < counts[2]) return;
      tap2 = 0;
      if (++tap1 == counts[1]) {
        tap1 = 0;
        if (++tap0 == counts[0]) return;
      }
      enter_line();
    }
    NHWC_HOST_DEVICE void enter_line() {
      line = rows.vector(0, tap0, indices[0]) + rows.vector(1, tap1, indices[1]);
      of_line = rows.weight(0, tap0, indices[0]) * rows.weight(1, tap1, indices[1]);
    }
  };

  NHWC_HOST_DEVICE void sum(std::uint32_t item) const {
    const std::uint32_t of_row = first_vector_ + remainder(item, plan_.width);
    std::uint32_t indices[3], counts[3], row = 0;
    bool is_inside = of_row < plan_.vectors.divisor;
    NHWC_UNROLL
    for (int axis = 2; axis >= 0; --axis) {
      indices[axis] = item & ((1u << plan_.shifts[axis]) - 1);
      item >>= plan_.shifts[axis];
      is_inside = is_inside && first_[axis] + indices[axis] < to(axis);
    }
    if (!is_inside) return;
    std::uint64_t rows = 1, input_rows = 1;
    NHWC_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      counts[axis] = access_.template load_shared<std::uint32_t>(shared_, count_at(axis, indices[axis]));
      row = row * to(axis) + first_[axis] + indices[axis];
      rows *= to(axis);
      input_rows *= plan_.from(axis);
    }
    const std::uint64_t vectors = plan_.vectors.divisor;
    const char* input = static_cast<const char*>(input_) + (sample_ * input_rows * vectors + of_row) * sizeof(Vector);
    Real sums[lanes] = {};
    Walk walk(*this, indices, counts);
    for (std::uint32_t left = counts[0] * counts[1] * counts[2]; left > 0;
         left -= left < in_flight ? left : in_flight) {
      Vector loaded[in_flight];
      Real weights[in_flight];
      NHWC_UNROLL
      for (unsigned i = 0; i < in_flight; ++i) {
        if (i >= left) continue;
        loaded[i] = access_.template load<Vector>(input + std::uint64_t{walk.vector()} * sizeof(Vector));
        weights[i] = walk.weight();
        walk.advance();
      }
      NHWC_UNROLL
      for (unsigned i = 0; i < in_flight; ++i) {
        if (i < left) add(sums, loaded[i], weights[i]);
      }
    }
    Vector result;
    if constexpr (lanes == 1) {
      result = Element::to_bits(sums[0]);
    } else {
      NHWC_UNROLL
      for (unsigned lane = 0; lane < lanes; ++lane) detail::insert<bytes>(result, lane, Element::to_bits(sums[lane]));
    }
    access_.store(static_cast<char*>(out_) + ((sample_ * rows + row) * vectors + of_row) * sizeof(Vector), result);
  }

  NHWC_HOST_DEVICE static void add(Real (&sums)[lanes], const Vector& loaded, Real weight) {
    NHWC_UNROLL
    for (unsigned lane = 0; lane < lanes; ++lane) {
      if constexpr (lanes == 1) {
        sums[lane] += weight * Element::to_real(loaded);
      } else {
        sums[lane] += weight * Element::to_real(detail::extract<bytes>(loaded, lane));
      }
    }
  }

  const ResamplePlan& plan_;
  const void* input_;
  void* out_;
  Access access_;
  char* shared_;
  std::uint32_t first_vector_, first_[3];
  std::uint64_t sample_;
};

}  // namespace nhwc::cuda
