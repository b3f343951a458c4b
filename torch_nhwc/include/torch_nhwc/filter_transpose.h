// The filter transpose: the kernel of every layout conversion of a convolution weight on a CPU.
//
// A weight [O, I, *kernel] is O filters. In contiguous format a filter is a row-major matrix of I rows (channels) and K
// columns (taps, the product of the kernel's sizes); in channels-last format it is the transpose, K rows and I columns,
// in the same I * K elements. Converting the weight is therefore O independent transposes, each within its own span:
//
//   to channels-last:  filter_transpose(source, destination, O, I, K)
//   back:              filter_transpose(source, destination, O, K, I)
//
// Needs C++17 and no other library. No allocation, no threads, no static state: split `filters` to use several threads.
// The code uses the instruction set that the including file is compiled for, see cpu/level.h. cpu/matrix_transpose.h
// cuts matrices into tiles, cpu/zip_network.h has the shuffles.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "torch_nhwc/cpu/level.h"
#include "torch_nhwc/cpu/matrix_transpose.h"
#include "torch_nhwc/version.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

/// How results are written. `non_temporal` stores bypass the caches: for destinations much larger than the caches whose
/// pages are resident already. They are used with registers of 64 bytes, for aligned rows of whole cache lines; and
/// from AVX2 on, through a buffer in cache, for other filters of at least 16 KB.
enum class Stores { cached, non_temporal };

/// Converts one element as the language does.
template <typename To>
struct StaticCast {
  template <typename From>
  constexpr To operator()(const From& value) const {
    return static_cast<To>(value);
  }
};

namespace detail {

/// Returns whether non-temporal stores can serve: all registers of 64 bytes are aligned, and no tiles overlap.
template <int size, int register_bytes>
bool can_stream(const void* destination, Index rows, Index columns) {
  const Index short_side = rows < columns ? rows : columns, long_side = rows < columns ? columns : rows;
#if NHWC_X86_LEVEL >= 3
  return register_bytes == 64 && is_shuffled(size) && short_side <= longest_strip_of(size) &&
         long_side * size % 64 == 0 && reinterpret_cast<std::uintptr_t>(destination) % 64 == 0;
#else
  return static_cast<void>(destination), short_side > long_side;  // never
#endif
}

/// Orders non-temporal stores before all that follows.
inline void finish_stream() {
#if NHWC_X86_LEVEL >= 1
  _mm_sfence();
#endif
}

/// Copies linearly, and prefetches what is `ahead` bytes further into the second-level cache: the first is full.
inline void copy_and_prefetch(const char* from, char* to, Index bytes, Index ahead) {
  constexpr Index line = 64;
  Index i = 0;
  for (; i + line <= bytes; i += line) {
#if defined(__GNUC__)
    __builtin_prefetch(from + i + ahead, /*rw=*/0, /*locality=*/2);
#endif
    std::memcpy(to + i, from + i, line);
  }
  std::memcpy(to + i, from + i, static_cast<std::size_t>(bytes - i));
}

template <int register_bytes, typename Way>
void transpose_filters(const typename Way::From* source, typename Way::To* destination, Index filters, Index rows,
                       Index columns, Stores stores, const Way& way) {
  const auto* from = reinterpret_cast<const char*>(source);
  auto* to = reinterpret_cast<char*>(destination);
  if (filters * rows * columns == 0) return;
  if (rows == 1 || columns == 1) return way(from, to, filters * rows * columns);
  const bool streams = stores == Stores::non_temporal &&
                       can_stream<sizeof(typename Way::To), register_bytes>(destination, rows, columns);
#if NHWC_HAS_SHUFFLES && NHWC_X86_LEVEL >= 2
  constexpr int to_size = sizeof(typename Way::To);
  if constexpr (is_shuffled(to_size)) {
    if (stores == Stores::non_temporal && !streams && serves_streaming(rows, columns, to_size)) {
      transpose_streamed<register_bytes>({from, to, filters, rows, columns, columns, rows, false}, way);
      return finish_stream();
    }
  }
#endif
  transpose<register_bytes>({from, to, filters, rows, columns, columns, rows, streams}, way);
  if (streams) finish_stream();
}

}  // namespace detail

/// Transposes `filters` consecutive row-major matrices from `rows` x `columns` to `columns` x `rows`. With one row or
/// one column this is a linear copy.
///
/// @tparam register_bytes  the width of the vector registers to use.
/// @param source           `filters * rows * columns` elements of a trivially copyable type, read only.
/// @param destination      as many elements; must not overlap `source`.
template <typename Element, int register_bytes = NHWC_REGISTER_BYTES>
void filter_transpose(const Element* source, Element* destination, std::int64_t filters, std::int64_t rows,
                      std::int64_t columns, Stores stores = Stores::cached) {
  static_assert(std::is_trivially_copyable_v<Element>, "filters are moved as bytes");
  detail::transpose_filters<register_bytes>(source, destination, filters, rows, columns, stores,
                                            detail::Keep<Element>{});
}

/// Transposes, and converts every element by `cast`.
///
/// @param cast  `To cast(From)`, called at least once for each element, in unspecified order; or, if many elements can
/// be
///              cast faster, `cast(const From* source, To* destination, std::int64_t count)`.
template <typename From, typename To, typename Cast = StaticCast<To>, int register_bytes = NHWC_REGISTER_BYTES,
          typename = std::enable_if_t<!std::is_same_v<Cast, Stores>>>
void filter_transpose(const From* source, To* destination, std::int64_t filters, std::int64_t rows,
                      std::int64_t columns, const Cast& cast = {}, Stores stores = Stores::cached) {
  static_assert(std::is_trivially_copyable_v<To>, "filters are moved as bytes");
  detail::transpose_filters<register_bytes>(source, destination, filters, rows, columns, stores,
                                            detail::Cast<From, To, Cast>{cast});
}

/// Transposes `filters` consecutive row-major matrices from `rows` x `columns` to `columns` x `rows`, each in its
/// place.
///
/// @param data     `filters * rows * columns` elements of a trivially copyable type, overwritten.
/// @param scratch  room for one filter, `rows * columns` elements; must not overlap `data`. Not used, and may be null,
///                 for filters of up to `detail::buffer_bytes`.
template <typename Element, int register_bytes = NHWC_REGISTER_BYTES>
void filter_transpose_in_place(Element* data, Element* scratch, std::int64_t filters, std::int64_t rows,
                               std::int64_t columns) {
  static_assert(std::is_trivially_copyable_v<Element>, "filters are moved as bytes");
  using detail::Index;
  const Index filter_bytes = rows * columns * static_cast<Index>(sizeof(Element));
  if (rows == 1 || columns == 1 || filter_bytes == 0) return;
  alignas(64) char buffer[detail::buffer_bytes];
  const bool is_small = filter_bytes <= detail::buffer_bytes;
  char* copy = is_small ? buffer : reinterpret_cast<char*>(scratch);
  char* bytes = reinterpret_cast<char*>(data);
  for (Index together = is_small ? detail::buffer_bytes / filter_bytes : 1; filters > 0; filters -= together) {
    if (together > filters) together = filters;
    detail::copy_and_prefetch(bytes, copy, together * filter_bytes, together * filter_bytes);
    detail::transpose<register_bytes>({copy, bytes, together, rows, columns, columns, rows, false},
                                      detail::Keep<Element>{});
    bytes += together * filter_bytes;
  }
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
