// The filter transpose: the one kernel behind every layout conversion of a convolution weight on a CPU.
//
// A weight [O, I, *kernel] is O filters. In contiguous format a filter is a row-major matrix of I rows (channels) and K
// columns (taps, the product of the kernel's sizes); in channels-last format it is the transpose, K rows and I columns,
// in the same I * K elements. Converting the weight is therefore O independent transposes, each within its own span:
//
//   to channels-last:  filter_transpose(source, destination, O, I, K)
//   back:              filter_transpose(source, destination, O, K, I)
//
// Needs C++17 and no other library. No allocation, no threads, no static state: split `filters` to use several threads.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "torch_nhwc/version.h"

namespace nhwc {

/// The default conversion of one element: the language's own.
template <typename To>
struct StaticCast {
  template <typename From>
  constexpr To operator()(const From& value) const {
    return static_cast<To>(value);
  }
};

/// Transposes `filters` consecutive row-major matrices from `rows` x `columns` to `columns` x `rows`, converting every
/// element by `cast` on the way. With one row or one column this is a linear, converting copy.
///
/// @param source       `filters * rows * columns` elements, read only.
/// @param destination  as many elements; must not overlap `source`.
/// @param cast         called once for each element, in unspecified order.
template <typename From, typename To, typename Cast = StaticCast<To>>
void filter_transpose(const From* source, To* destination, std::int64_t filters, std::int64_t rows,
                      std::int64_t columns, Cast cast = {}) {
  // A strip of source rows is short enough that its cache lines, each touched once for every column, stay in L1.
  constexpr std::int64_t strip = 64;
  const std::int64_t filter_size = rows * columns;
  if (rows == 1 || columns == 1) {
    if constexpr (std::is_same_v<From, To> && std::is_same_v<Cast, StaticCast<To>> &&
                  std::is_trivially_copyable_v<To>) {
      if (filters * filter_size > 0) {
        std::memcpy(destination, source, static_cast<std::size_t>(filters * filter_size) * sizeof(To));
      }
    } else {
      for (std::int64_t i = 0; i < filters * filter_size; ++i) destination[i] = cast(source[i]);
    }
    return;
  }
  for (std::int64_t filter = 0; filter < filters; ++filter) {
    for (std::int64_t begin = 0; begin < rows; begin += strip) {
      const std::int64_t end = begin + strip < rows ? begin + strip : rows;
      for (std::int64_t column = 0; column < columns; ++column) {
        for (std::int64_t row = begin; row < end; ++row) {
          destination[column * rows + row] = cast(source[row * columns + column]);
        }
      }
    }
    source += filter_size;
    destination += filter_size;
  }
}

/// Transposes `filters` consecutive row-major matrices from `rows` x `columns` to `columns` x `rows`, each in its
/// place.
///
/// @param data     `filters * rows * columns` elements of a trivially copyable type, overwritten.
/// @param scratch  room for one filter, `rows * columns` elements; must not overlap `data`.
template <typename Element>
void filter_transpose_in_place(Element* data, Element* scratch, std::int64_t filters, std::int64_t rows,
                               std::int64_t columns) {
  static_assert(std::is_trivially_copyable_v<Element>, "filters are moved as bytes");
  const std::int64_t filter_size = rows * columns;
  if (rows == 1 || columns == 1 || filter_size == 0) return;
  for (std::int64_t filter = 0; filter < filters; ++filter, data += filter_size) {
    std::memcpy(scratch, data, static_cast<std::size_t>(filter_size) * sizeof(Element));
    filter_transpose(scratch, data, 1, rows, columns);
  }
}

}  // namespace nhwc
