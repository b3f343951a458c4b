// The work of one block of a GPU's threads on its tile of a weight.
//
// A tile goes through shared memory in two phases with a barrier between them, each a function of the block and the
// thread. They are marked for host and device, so that everything but the barrier can be run, tested and counted
// without a GPU, by any C++17 compiler. launch_plan.h cuts weights into tiles, launch.h has their layout in shared
// memory, and filter_transpose.cuh and launch_kernel.cuh have the kernels.
#pragma once

#include <cstdint>

#include "torch_nhwc/cuda/elements.h"
#include "torch_nhwc/cuda/launch.h"

#if defined(__CUDA_ARCH__)
#define NHWC_UNROLL _Pragma("unroll")
#else
#define NHWC_UNROLL
#endif

namespace nhwc {
namespace cuda {

/// Accesses memory plainly. Tests pass a class that counts.
struct DirectAccess {
  template <typename Value>
  NHWC_HOST_DEVICE Value load(const void* from) const {
    return *static_cast<const Value*>(from);
  }
  template <typename Value>
  NHWC_HOST_DEVICE void store(void* to, const Value& value) const {
    *static_cast<Value*>(to) = value;
  }
  template <typename Value>
  NHWC_HOST_DEVICE Value load_shared(const char* tile, std::uint32_t offset) const {
    return *reinterpret_cast<const Value*>(tile + offset);
  }
  template <typename Value>
  NHWC_HOST_DEVICE void store_shared(char* tile, std::uint32_t offset, const Value& value) const {
    *reinterpret_cast<Value*>(tile + offset) = value;
  }
};

namespace detail {

// Divides many numbers below 2^15 by one number above 1.
class Divisor {
 public:
  NHWC_HOST_DEVICE explicit Divisor(std::uint32_t divisor) : reciprocal_(0xFFFFFFFFu / divisor + 1) {}
  NHWC_HOST_DEVICE std::uint32_t quotient(std::uint32_t dividend) const {
#if defined(__CUDA_ARCH__)
    return __umulhi(dividend, reciprocal_);
#else
    return static_cast<std::uint32_t>(std::uint64_t{dividend} * reciprocal_ >> 32);
#endif
  }

 private:
  std::uint32_t reciprocal_;
};

// Moves values[(i + by) % count] to values[i]. All indices are constants, so that the values stay in registers.
template <typename Value, unsigned count>
NHWC_HOST_DEVICE void rotate(Value (&values)[count], std::uint32_t by) {
  NHWC_UNROLL
  for (unsigned step = 1; step < count; step *= 2) {
    Value rotated[count];
    NHWC_UNROLL
    for (unsigned i = 0; i < count; ++i) rotated[i] = by & step ? values[(i + step) % count] : values[i];
    NHWC_UNROLL
    for (unsigned i = 0; i < count; ++i) values[i] = rotated[i];
  }
}

}  // namespace detail

/// One tile of a weight: all threads call `load`, wait at a barrier, and call `store`.
template <Elements elements, typename Access = DirectAccess>
class Tile {
 public:
  /// @param index   of the tile among those of the weight.
  /// @param shared  room for the tile, aligned to 16 bytes.
  NHWC_HOST_DEVICE Tile(const Filters& filters, std::uint32_t index, char* shared, Access access = {})
      : filters_(filters), index_(index), shared_(shared), access_(access) {}

  NHWC_HOST_DEVICE void load(std::uint32_t thread) const {
    switch (filters_.way) {
      case Way::gather: return load_linear(filters_.columns, count() * (16 / to_bytes), thread);
      case Way::scatter: return move_bundles<true>(thread);
      case Way::filters: return load_linear(filters_.columns, count() * filters_.rows, thread);
      case Way::rectangle: return move_rectangle<true>(thread);
      case Way::copy: return;
    }
  }

  NHWC_HOST_DEVICE void store(std::uint32_t thread) const {
    switch (filters_.way) {
      case Way::gather: return move_bundles<false>(thread);
      case Way::scatter: return store_linear(thread);
      case Way::filters: return store_filters(thread);
      case Way::rectangle: return move_rectangle<false>(thread);
      case Way::copy: return copy(thread);
    }
  }

 private:
  static constexpr unsigned from_bytes = source_bytes(elements), to_bytes = destination_bytes(elements);
  using From = detail::Bits<from_bytes>;
  using To = detail::Bits<to_bytes>;
  static constexpr unsigned in_flight = 4;  // loads of a thread that wait at the same time

  NHWC_HOST_DEVICE std::uint32_t first() const { return index_ * filters_.per_block; }
  NHWC_HOST_DEVICE std::uint32_t least(std::uint32_t a, std::uint32_t b) const { return a < b ? a : b; }
  /// What the tile has of the weight's count: bundles, filters, or elements.
  NHWC_HOST_DEVICE std::uint32_t count() const { return least(filters_.per_block, filters_.count - first()); }
  NHWC_HOST_DEVICE std::uint64_t filter_size() const { return std::uint64_t{filters_.rows} * filters_.columns; }

  // Loads every `stride`-th value from `begin` on, `pitch` bytes apart, and uses it; several loads wait together.
  template <typename Vector, unsigned stride, typename Use>
  NHWC_HOST_DEVICE void load_each(const char* source, std::uint64_t pitch, std::uint32_t begin, std::uint32_t end,
                                  const Use& use) const {
    for (std::uint32_t first = begin; first < end; first += in_flight * stride) {
      Vector loaded[in_flight];
      NHWC_UNROLL
      for (unsigned i = 0; i < in_flight; ++i) {
        const std::uint32_t index = first + i * stride;
        if (index < end) loaded[i] = access_.template load<Vector>(source + index * pitch);
      }
      NHWC_UNROLL
      for (unsigned i = 0; i < in_flight; ++i) {
        const std::uint32_t index = first + i * stride;
        if (index < end) use(index, loaded[i]);
      }
    }
  }

  // The linear side of a tile, by vectors of 16 bytes. In the tile a vector is several units, which the threads of a
  // warp access in different rotations: without them, every fourth word would be in the same bank.
  template <unsigned linear_bytes, unsigned tile_bytes>
  struct Linear {
    static constexpr unsigned elements_of_a_vector = 16 / linear_bytes;
    static constexpr unsigned unit_bytes = tile_bytes < 4 ? 4 : tile_bytes;
    using Unit = detail::Bits<unit_bytes>;
    static constexpr unsigned units = elements_of_a_vector * tile_bytes / unit_bytes;
    static constexpr unsigned vectors_of_all_banks = 128 / (units * unit_bytes);

    // Where a vector begins, in units, and its rotation.
    std::uint32_t begin, rotation;
    NHWC_HOST_DEVICE Linear(std::uint32_t vector, const detail::Divisor& chunks_between_gaps) {
      const std::uint32_t gaps = chunks_between_gaps.quotient(vector * (units * unit_bytes) / 16);
      begin = vector * units + gaps;
      rotation = (vector / vectors_of_all_banks - gaps) % units;
    }
    NHWC_HOST_DEVICE std::uint32_t offset(unsigned step) const {
      return (begin + (step + rotation) % units) * unit_bytes;
    }
  };

  // Loads `lines` of `length` consecutive elements into the tile.
  NHWC_HOST_DEVICE void load_linear(std::uint32_t length, std::uint32_t lines, std::uint32_t thread) const {
    using Side = Linear<from_bytes, to_bytes>;
    const TileLayout layout(length, to_bytes);
    const detail::Divisor chunks_between_gaps(layout.chunks_between_gaps());
    const char* source = filters_.source + linear_begin() * from_bytes;
    const std::uint32_t end = lines * length, vectors = end / Side::elements_of_a_vector;
    load_each<Quad, threads_of_a_block>(source, 16, thread, vectors, [&](std::uint32_t vector, const Quad& loaded) {
      const Side side(vector, chunks_between_gaps);
      const Quad in[] = {loaded};
      typename Side::Unit units[Side::units];
      convert(in, units);
      detail::rotate(units, side.rotation);
      NHWC_UNROLL
      for (unsigned step = 0; step < Side::units; ++step) access_.store_shared(shared_, side.offset(step), units[step]);
    });
    for (std::uint32_t i = vectors * Side::elements_of_a_vector + thread; i < end; i += threads_of_a_block) {
      const To element = detail::cast<elements>(access_.template load<From>(source + std::uint64_t{i} * from_bytes));
      access_.store_shared(shared_, layout.line(i / length) + i % length * to_bytes, element);
    }
  }

  // Stores the tile's bundles of columns, one after the other.
  NHWC_HOST_DEVICE void store_linear(std::uint32_t thread) const {
    using Side = Linear<to_bytes, from_bytes>;
    const TileLayout layout(filters_.rows, from_bytes);
    const detail::Divisor chunks_between_gaps(layout.chunks_between_gaps());
    char* destination = filters_.destination + linear_begin() * to_bytes;
    const std::uint32_t vectors = count() * filters_.rows * (16 / from_bytes) / Side::elements_of_a_vector;
    for (std::uint32_t vector = thread; vector < vectors; vector += threads_of_a_block) {
      const Side side(vector, chunks_between_gaps);
      typename Side::Unit units[Side::units];
      NHWC_UNROLL
      for (unsigned step = 0; step < Side::units; ++step) {
        units[step] = access_.template load_shared<typename Side::Unit>(shared_, side.offset(step));
      }
      detail::rotate(units, Side::units - side.rotation);
      Quad out[1];
      convert(units, out);
      access_.store(destination + std::uint64_t{vector} * 16, out[0]);
    }
  }

  // Casts elements from one packing to another: a linear vector is one quad, in the tile it is several units.
  template <typename In, unsigned count_in, typename Out, unsigned count_out>
  NHWC_HOST_DEVICE static void convert(const In (&in)[count_in], Out (&out)[count_out]) {
    constexpr unsigned in_a_quad = 16 / sizeof(In), out_a_quad = 16 / sizeof(Out);
    constexpr unsigned from_a_quad = 16 / from_bytes, to_a_quad = 16 / to_bytes;
    Quad packed_in[sizeof(in) < 16 ? 1 : sizeof(in) / 16], packed_out[sizeof(out) < 16 ? 1 : sizeof(out) / 16];
    NHWC_UNROLL
    for (unsigned i = 0; i < count_in; ++i) detail::insert<sizeof(In)>(packed_in[i / in_a_quad], i % in_a_quad, in[i]);
    NHWC_UNROLL
    for (unsigned i = 0; i < sizeof(in) / from_bytes; ++i) {
      const auto element = detail::extract<from_bytes>(packed_in[i / from_a_quad], i % from_a_quad);
      detail::insert<to_bytes>(packed_out[i / to_a_quad], i % to_a_quad, detail::cast<elements>(element));
    }
    NHWC_UNROLL
    for (unsigned i = 0; i < count_out; ++i) {
      out[i] = detail::extract<sizeof(Out)>(packed_out[i / out_a_quad], i % out_a_quad);
    }
  }

  // Returns the element at which the tile begins on its linear side.
  NHWC_HOST_DEVICE std::uint64_t linear_begin() const {
    switch (filters_.way) {
      case Way::gather: return std::uint64_t{first()} * (16 / to_bytes) * filters_.columns;
      case Way::scatter: return std::uint64_t{first()} * (16 / from_bytes) * filters_.rows;
      default: return first() * filter_size();
    }
  }

  // The other side of bundles: 16 bytes of every line, to or from the line's piece in memory. A thread stays with one
  // bundle and walks along its lines; if there are fewer bundles than threads, several threads share the lines.
  template <bool is_load>
  NHWC_HOST_DEVICE void move_bundles(std::uint32_t thread) const {
    constexpr unsigned bytes = is_load ? from_bytes : to_bytes, lines = 16 / bytes;
    using Element = detail::Bits<bytes>;
    const std::uint32_t length = is_load ? filters_.rows : filters_.columns;
    const std::uint32_t of_a_filter = (is_load ? filters_.columns : filters_.rows) / lines;
    const TileLayout layout(length, bytes);
    const Share share(length, filters_.per_block, bytes, layout.shift);
    const std::uint32_t begin = thread / share.bundles * share.span, end = least(begin + share.span, length);
    const std::uint64_t step = std::uint64_t{of_a_filter} * 16;
    for (std::uint32_t bundle = thread % share.bundles; bundle < count(); bundle += share.bundles) {
      const std::uint32_t filter = (first() + bundle) / of_a_filter, piece = (first() + bundle) % of_a_filter;
      const std::uint64_t place = filter * step * length + std::uint64_t{piece} * 16;
      const std::uint32_t base = layout.bundle(bundle);
      if constexpr (is_load) {
        load_each<Quad, 1>(filters_.source + place, step, begin, end, [&](std::uint32_t k, const Quad& loaded) {
          NHWC_UNROLL
          for (unsigned line = 0; line < lines; ++line) {
            access_.store_shared(shared_, base + (line * length + k) * bytes, detail::extract<bytes>(loaded, line));
          }
        });
      } else {
        for (std::uint32_t k = begin; k < end; ++k) {
          Quad out;
          NHWC_UNROLL
          for (unsigned line = 0; line < lines; ++line) {
            detail::insert<bytes>(out, line,
                                  access_.template load_shared<Element>(shared_, base + (line * length + k) * bytes));
          }
          access_.store(filters_.destination + place + k * step, out);
        }
      }
    }
  }

  // Shares the lines of a tile's bundles among threads. A warp with fewer bundles than lanes is at several places of
  // the lines at once; their distance is chosen so that they are in different banks, too.
  struct Share {
    std::uint32_t bundles = threads_of_a_block;  // of neighbouring threads
    std::uint32_t span;                          // neighbouring places that one thread takes
    NHWC_HOST_DEVICE Share(std::uint32_t length, std::uint32_t bundles_of_a_tile, unsigned bytes, std::uint32_t shift) {
      while (bundles / 2 >= bundles_of_a_tile) bundles /= 2;
      const std::uint32_t sharers = threads_of_a_block / bundles;
      span = (length + sharers - 1) / sharers;
      const unsigned unit_bytes = bytes < 4 ? 4 : bytes;
      if (bundles < 8 || bundles * unit_bytes >= 128) return;
      const std::uint32_t distance = (bundles >> shift) * (unit_bytes / bytes);
      span = ((span + distance - 1) / distance | 1) * distance;
    }
  };

  // Stores whole filters from the tile, linearly: each thread walks down the columns from the begin of its vector.
  NHWC_HOST_DEVICE void store_filters(std::uint32_t thread) const {
    constexpr unsigned of_a_vector = 16 / to_bytes;
    const TileLayout layout(filters_.columns, to_bytes);
    const std::uint32_t rows = filters_.rows, columns = filters_.columns, size = rows * columns;
    const std::uint32_t end = count() * size, vectors = end / of_a_vector;
    char* destination = filters_.destination + linear_begin() * to_bytes;
    const auto element = [&](std::uint32_t filter, std::uint32_t row, std::uint32_t column) {
      return access_.template load_shared<To>(shared_, layout.line(filter * rows + row) + column * to_bytes);
    };
    for (std::uint32_t vector = thread; vector < vectors; vector += threads_of_a_block) {
      const std::uint32_t begin = vector * of_a_vector;
      std::uint32_t filter = begin / size, column = begin % size / rows, row = begin % size % rows;
      Quad out;
      NHWC_UNROLL
      for (unsigned i = 0; i < of_a_vector; ++i) {
        detail::insert<to_bytes>(out, i, element(filter, row, column));
        const bool next_column = ++row == rows;
        row = next_column ? 0 : row;
        column += next_column;
        const bool next_filter = column == columns;
        column = next_filter ? 0 : column;
        filter += next_filter;
      }
      access_.store(destination + std::uint64_t{vector} * 16, out);
    }
    for (std::uint32_t i = vectors * of_a_vector + thread; i < end; i += threads_of_a_block) {
      const std::uint32_t rest = i % size;
      access_.store(destination + std::uint64_t{i} * to_bytes, element(i / size, rest % rows, rest / rows));
    }
  }

  // A part of one filter, by its first row and column.
  struct Rectangle {
    std::uint32_t filter, row, column, height, width, pitch;
  };
  NHWC_HOST_DEVICE Rectangle rectangle() const {
    const std::uint32_t height = filters_.per_block, width = filters_.width;
    const std::uint32_t down = (filters_.rows + height - 1) / height, across = (filters_.columns + width - 1) / width;
    const std::uint32_t rest = index_ % (down * across);
    const std::uint32_t row = rest / across * height, column = rest % across * width;
    return {index_ / (down * across),
            row,
            column,
            least(height, filters_.rows - row),
            least(width, filters_.columns - column),
            width | 1};
  }
  template <bool is_load>
  NHWC_HOST_DEVICE void move_rectangle(std::uint32_t thread) const {
    const Rectangle part = rectangle();
    for (std::uint32_t i = thread; i < part.height * part.width; i += threads_of_a_block) {
      const std::uint32_t row = is_load ? i / part.width : i % part.height;
      const std::uint32_t column = is_load ? i % part.width : i / part.height;
      const std::uint32_t in_tile = (row * part.pitch + column) * to_bytes;
      const std::uint64_t filter = part.filter * filter_size(), down = part.row + row, across = part.column + column;
      if constexpr (is_load) {
        const char* from = filters_.source + (filter + down * filters_.columns + across) * from_bytes;
        access_.store_shared(shared_, in_tile, detail::cast<elements>(access_.template load<From>(from)));
      } else {
        char* to = filters_.destination + (filter + across * filters_.rows + down) * to_bytes;
        access_.store(to, access_.template load_shared<To>(shared_, in_tile));
      }
    }
  }

  // Copies by vectors of 16 bytes of the wider type if everything is aligned.
  NHWC_HOST_DEVICE void copy(std::uint32_t thread) const {
    constexpr unsigned of_a_vector = 16 / (from_bytes > to_bytes ? from_bytes : to_bytes);
    using FromVector = detail::Bits<of_a_vector * from_bytes>;
    using ToVector = detail::Bits<of_a_vector * to_bytes>;
    const char* source = filters_.source + std::uint64_t{first()} * from_bytes;
    char* destination = filters_.destination + std::uint64_t{first()} * to_bytes;
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(source) % sizeof(FromVector) == 0 &&
                            reinterpret_cast<std::uintptr_t>(destination) % sizeof(ToVector) == 0;
    const std::uint32_t end = count(), vectors = is_aligned ? end / of_a_vector : 0;
    const auto store = [&](std::uint32_t vector, const FromVector& loaded) {
      access_.store(destination + vector * sizeof(ToVector), cast_all<ToVector>(loaded));
    };
    load_each<FromVector, threads_of_a_block>(source, sizeof(FromVector), thread, vectors, store);
    for (std::uint32_t i = vectors * of_a_vector + thread; i < end; i += threads_of_a_block) {
      const From element = access_.template load<From>(source + std::uint64_t{i} * from_bytes);
      access_.store(destination + std::uint64_t{i} * to_bytes, detail::cast<elements>(element));
    }
  }

  template <typename ToVector, typename FromVector>
  NHWC_HOST_DEVICE static ToVector cast_all(const FromVector& vector) {
    Quad out;
    NHWC_UNROLL
    for (unsigned i = 0; i < sizeof(ToVector) / to_bytes; ++i) {
      detail::insert<to_bytes>(out, i, detail::cast<elements>(detail::extract<from_bytes>(detail::as_quad(vector), i)));
    }
    return detail::extract<sizeof(ToVector)>(out, 0);
  }

  const Filters& filters_;
  std::uint32_t index_;
  char* shared_;
  Access access_;
};

}  // namespace cuda
}  // namespace nhwc
