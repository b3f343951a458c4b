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
  static constexpr int blocks_of_processor = 4;

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

/// Sums rows: the threads compute the taps of a tile, and then its vectors, `summed_rows` at a time.
template <NormType type, unsigned lanes, unsigned summed_rows, typename Access = DirectAccess>
class SummedRows {
 public:
  /// With as many registers as the sums and the loads in flight need.
  static constexpr int blocks_of_processor = type == NormType::float64 ? 2 : summed_rows == 1 ? 4 : lanes == 8 ? 2 : 3;

  NHWC_HOST_DEVICE SummedRows(const ResampleArguments& arguments, std::uint32_t block, char* shared, Access access = {})
      : plan_(arguments.plan), input_(arguments.input), out_(arguments.out), access_(access), shared_(shared) {
    first_vector_ = remainder(block, plan_.vector_tiles) * plan_.width.divisor;
    NHWC_UNROLL
    for (int axis = 2; axis >= 0; --axis) first_[axis] = remainder(block, plan_.tiles[axis]) << plan_.shifts[axis];
    sample_ = block;
  }

  template <typename All>
  NHWC_HOST_DEVICE void run(const All& all) const {
    all([&](std::uint32_t thread) {
      list_planes(thread);
      list_taps(thread);
    });
    all([&](std::uint32_t thread) {
      for (std::uint32_t item = thread; item < plan_.items(); item += resample_threads) sum(item);
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

  // Shared memory: the taps of the last two axes, of which the n-th of a tile's indices are neighbours, so that threads
  // find them in different banks; the planes, on the first axis, and for which rows they are, by bits; the weights that
  // a plane has in each row; and how many taps an index has.
  struct alignas(2 * sizeof(Real)) Tap {
    Real weight;
    std::uint32_t vector;
  };
  NHWC_HOST_DEVICE std::uint32_t tap_at(int axis, std::uint32_t index) const {
    const std::uint32_t before = axis == 1 ? 0 : plan_.most[1] << plan_.shifts[1];
    return (before + index) * static_cast<std::uint32_t>(sizeof(Tap));
  }
  NHWC_HOST_DEVICE std::uint32_t plane_at(std::uint32_t plane) const {
    return tap_at(2, plan_.most[2] << plan_.shifts[2]) + plane * 8;
  }
  NHWC_HOST_DEVICE std::uint32_t weights_at(std::uint32_t plane) const {
    return plane_at(plan_.most[0]) + plane * summed_rows * static_cast<std::uint32_t>(sizeof(Real));
  }
  NHWC_HOST_DEVICE std::uint32_t count_at(int axis, std::uint32_t index) const {
    return weights_at(plan_.most[0]) + ((axis == 1 ? 0 : 1u << plan_.shifts[1]) + index) * 4;
  }

  NHWC_HOST_DEVICE std::int32_t to(int axis) const { return static_cast<std::int32_t>(plan_.sizes[axis].divisor); }

  /// Lists the planes of a tile, by one thread each. Some are of no row, or are another's already.
  NHWC_HOST_DEVICE void list_planes(std::uint32_t thread) const {
    const ResampleAxis& along = plan_.axes[0];
    const auto begin = static_cast<std::int32_t>(first_[0]), tile = std::int32_t{1} << plan_.shifts[0];
    const std::int32_t rows = to(0) - begin < tile ? to(0) - begin : tile;
    const auto range = along.range(begin, rows);
    for (std::uint32_t plane = thread; plane < plan_.most[0]; plane += resample_threads) {
      const auto number = static_cast<std::int32_t>(plane);
      Real weights[summed_rows] = {};
      std::uint32_t has_row = 0;
      std::int32_t from = -1;
      const auto set = [&](std::int32_t row, Real weight) {
        NHWC_UNROLL
        for (std::int32_t i = 0; i < static_cast<std::int32_t>(summed_rows); ++i) {
          if (i == row && row < rows) weights[i] = weight, has_row |= 1u << i;
        }
      };
      if (plan_.is_transposed) {
        from = along.is_folded() ? along.folded(begin + number % tile, number / tile) : range.begin + number;
        const bool is_asked = from >= 0 && from < along.out && (along.is_folded() || from < range.end);
        if (is_asked) {
          const auto taps = along.template taps<Real>(from);
          set(taps.first - begin, taps.weight);
          if (taps.has_next) set(taps.first + 1 - begin, taps.next_weight);
        }
        if (along.is_folded() && number % tile >= rows) has_row = 0;
      } else {
        const auto asked = along.template taps<Real>(begin + number / 2 < to(0) ? begin + number / 2 : begin);
        from = asked.first + number % 2;
        bool is_listed = number % 2 != 0 && !asked.has_next;
        for (std::int32_t row = 0; row < rows; ++row) {
          const auto taps = along.template taps<Real>(begin + row);
          if (taps.first == from) set(row, taps.weight);
          if (taps.has_next && taps.first + 1 == from) set(row, taps.next_weight);
          const bool is_before = row < number / 2 || (row == number / 2 && number % 2 != 0);
          is_listed = is_listed || (is_before && taps.first == from) ||
                      (row < number / 2 && taps.has_next && taps.first + 1 == from);
        }
        if (is_listed) has_row = 0;
      }
      NHWC_UNROLL
      for (unsigned i = 0; i < summed_rows; ++i) {
        access_.store_shared(shared_, weights_at(plane) + i * static_cast<std::uint32_t>(sizeof(Real)), weights[i]);
      }
      const auto vectors = plan_.vectors.divisor * plan_.from(1) * plan_.from(2);
      access_.store_shared(shared_, plane_at(plane), Pair{{static_cast<std::uint32_t>(from) * vectors, has_row}});
    }
  }

  /// Lists the taps of each index of a tile on the last two axes, by one thread each.
  NHWC_HOST_DEVICE void list_taps(std::uint32_t thread) const {
    const std::uint32_t tile1 = 1u << plan_.shifts[1], tile2 = 1u << plan_.shifts[2];
    for (std::uint32_t i = thread; i < tile1 + tile2; i += resample_threads) {
      if (i < tile2) {
        list_taps<2>(i, plan_.vectors.divisor);
      } else {
        list_taps<1>(i - tile2, plan_.vectors.divisor * plan_.from(2));
      }
    }
  }
  template <int axis>
  NHWC_HOST_DEVICE void list_taps(std::uint32_t index, std::uint32_t stride) const {
    std::uint32_t count = 0;
    const auto add = [&](std::int32_t from, Real weight) {
      if (count == plan_.most[axis]) return;
      access_.store_shared(shared_, tap_at(axis, (count << plan_.shifts[axis]) + index),
                           Tap{weight, static_cast<std::uint32_t>(from) * stride});
      ++count;
    };
    const auto to_index = static_cast<std::int32_t>(first_[axis] + index);
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

  /// Walks over the taps of a plane, those of the last axis first.
  struct Walk {
    const SummedRows& rows;
    std::uint32_t at1, end1, begin2, at2, end2;  // places in shared memory
    Tap line;

    /// Returns the next tap of the plane.
    NHWC_HOST_DEVICE Tap next() {
      const Tap found = rows.tap(at2);
      const Tap both{line.weight * found.weight, line.vector + found.vector};
      at2 += rows.step(2);
      if (at2 == end2) {
        at2 = begin2;
        at1 += rows.step(1);
        if (at1 != end1) line = rows.tap(at1);
      }
      return both;
    }
  };
  NHWC_HOST_DEVICE std::uint32_t step(int axis) const {
    return static_cast<std::uint32_t>(sizeof(Tap)) << plan_.shifts[axis];
  }
  NHWC_HOST_DEVICE Tap tap(std::uint32_t at) const { return access_.template load_shared<Tap>(shared_, at); }

  NHWC_HOST_DEVICE void sum(std::uint32_t item) const {
    const std::uint32_t of_row = first_vector_ + remainder(item, plan_.width);
    const std::uint32_t index2 = item & ((1u << plan_.shifts[2]) - 1), index1 = item >> plan_.shifts[2];
    const auto to1 = static_cast<std::int32_t>(first_[1] + index1), to2 = static_cast<std::int32_t>(first_[2] + index2);
    if (of_row >= plan_.vectors.divisor || to1 >= to(1) || to2 >= to(2)) return;
    const auto count1 = access_.template load_shared<std::uint32_t>(shared_, count_at(1, index1));
    const auto count2 = access_.template load_shared<std::uint32_t>(shared_, count_at(2, index2));
    const std::uint32_t count = count1 * count2;
    const std::uint64_t vectors = plan_.vectors.divisor;
    const std::uint64_t input_rows = std::uint64_t{1} * plan_.from(0) * plan_.from(1) * plan_.from(2);
    const char* input = static_cast<const char*>(input_) + (sample_ * input_rows * vectors + of_row) * sizeof(Vector);
    const std::uint32_t line = tap_at(1, index1), column = tap_at(2, index2);
    Real sums[summed_rows][lanes] = {};
    for (std::uint32_t plane = 0; plane < plan_.most[0]; ++plane) {
      const Pair place = access_.template load_shared<Pair>(shared_, plane_at(plane));
      const std::uint32_t has_row = place.words[1];
      if (has_row == 0 || count == 0) continue;
      // Rows that share nothing have weights of 1.
      constexpr bool is_shared = summed_rows > 1;
      Real of_plane[is_shared ? lanes : 1] = {};
      Walk walk{*this, line, line + count1 * step(1), column, column, column + count2 * step(2), tap(line)};
      for (std::uint32_t left = count; left > 0; left -= left < in_flight ? left : in_flight) {
        Vector loaded[in_flight];
        Real weights[in_flight];
        NHWC_UNROLL
        for (unsigned i = 0; i < in_flight; ++i) {
          if (i >= left) continue;
          const Tap tap = walk.next();
          loaded[i] =
              access_.template load<Vector>(input + std::uint64_t{place.words[0] + tap.vector} * sizeof(Vector));
          weights[i] = tap.weight;
        }
        NHWC_UNROLL
        for (unsigned i = 0; i < in_flight; ++i) {
          if (i >= left) continue;
          if constexpr (is_shared) {
            add(of_plane, loaded[i], weights[i]);
          } else {
            add(sums[0], loaded[i], Real(1));
          }
        }
      }
      NHWC_UNROLL
      for (unsigned row = 0; is_shared && row < summed_rows; ++row) {
        if ((has_row >> row & 1) == 0) continue;
        const auto at = weights_at(plane) + row * static_cast<std::uint32_t>(sizeof(Real));
        const Real weight = access_.template load_shared<Real>(shared_, at);
        NHWC_UNROLL
        for (unsigned lane = 0; lane < lanes; ++lane) sums[row][lane] += weight * of_plane[is_shared ? lane : 0];
      }
    }
    std::uint64_t row = (sample_ * to(0) + first_[0]) * to(1) * to(2) + std::uint64_t{1} * to1 * to(2) + to2;
    NHWC_UNROLL
    for (unsigned i = 0; i < summed_rows; ++i, row += std::uint64_t{1} * to(1) * to(2)) {
      if (i >> plan_.shifts[0] == 0 && static_cast<std::int32_t>(first_[0] + i) < to(0)) store(row, of_row, sums[i]);
    }
  }

  NHWC_HOST_DEVICE void store(std::uint64_t row, std::uint32_t of_row, const Real (&sums)[lanes]) const {
    Vector result;
    if constexpr (lanes == 1) {
      result = Element::to_bits(sums[0]);
    } else {
      NHWC_UNROLL
      for (unsigned lane = 0; lane < lanes; ++lane) detail::insert<bytes>(result, lane, Element::to_bits(sums[lane]));
    }
    access_.store(static_cast<char*>(out_) + (row * plan_.vectors.divisor + of_row) * sizeof(Vector), result);
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

namespace detail {

template <NormType type, typename Access, typename Use>
auto with_summed_rows(const ResamplePlan& plan, const Use& use) {
  constexpr unsigned lanes = 16 / bytes_of(type);
  if (summed_rows_of(plan.axes[0].mode) == 1) {
    return plan.bytes == 16 ? use(BlockType<SummedRows<type, lanes, 1, Access>>{})
                            : use(BlockType<SummedRows<type, 1, 1, Access>>{});
  }
  return plan.bytes == 16 ? use(BlockType<SummedRows<type, lanes, 4, Access>>{})
                          : use(BlockType<SummedRows<type, 1, 4, Access>>{});
}

}  // namespace detail

/// Calls `use` with the `BlockType` of a plan.
template <typename Access = DirectAccess, typename Use>
auto with_resample_block(NormType type, const ResamplePlan& plan, const Use& use) {
  if (plan.is_copy) {
    switch (plan.bytes) {
      case 1: return use(BlockType<CopiedRows<1, Access>>{});
      case 2: return use(BlockType<CopiedRows<2, Access>>{});
      case 4: return use(BlockType<CopiedRows<4, Access>>{});
      case 8: return use(BlockType<CopiedRows<8, Access>>{});
      default: return use(BlockType<CopiedRows<16, Access>>{});
    }
  }
  switch (type) {
    case NormType::float32: return detail::with_summed_rows<NormType::float32, Access>(plan, use);
    case NormType::bfloat16: return detail::with_summed_rows<NormType::bfloat16, Access>(plan, use);
    case NormType::float16: return detail::with_summed_rows<NormType::float16, Access>(plan, use);
    default: return detail::with_summed_rows<NormType::float64, Access>(plan, use);
  }
}

}  // namespace nhwc::cuda
