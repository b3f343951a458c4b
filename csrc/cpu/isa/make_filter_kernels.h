// Makes the table of kernels for one instruction set, which the including file chooses first.
#pragma once

#include "torch_nhwc/casts.h"
#include "torch_nhwc/filter_transpose.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

// Not aligned to its size: complex tensors are aligned to their parts alone.
struct Element16 {
  std::uint64_t halves[2];
};

// A register of 64 bytes is a whole cache line, which goes past the caches without a buffer.
template <int register_bytes>
constexpr int streaming_bytes = NHWC_REGISTER_BYTES == 64 ? 64 : register_bytes;

template <typename Element, int register_bytes>
void transpose_elements(const void* source, void* destination, std::int64_t filters, std::int64_t rows,
                        std::int64_t columns, bool non_temporal) {
  const auto* from = static_cast<const Element*>(source);
  auto* to = static_cast<Element*>(destination);
  if (non_temporal) {
    filter_transpose<Element, streaming_bytes<register_bytes>>(from, to, filters, rows, columns, Stores::non_temporal);
  } else {
    filter_transpose<Element, register_bytes>(from, to, filters, rows, columns);
  }
}

template <typename Element, int register_bytes>
void transpose_elements_in_place(void* data, void* scratch, std::int64_t filters, std::int64_t rows,
                                 std::int64_t columns) {
  filter_transpose_in_place<Element, register_bytes>(static_cast<Element*>(data), static_cast<Element*>(scratch),
                                                     filters, rows, columns);
}

template <typename From, typename To, typename Cast, int register_bytes>
void transpose_and_cast(const void* source, void* destination, std::int64_t filters, std::int64_t rows,
                        std::int64_t columns, bool non_temporal) {
  const auto* from = static_cast<const From*>(source);
  auto* to = static_cast<To*>(destination);
  if (non_temporal) {
    filter_transpose<From, To, Cast, streaming_bytes<register_bytes>>(from, to, filters, rows, columns, {},
                                                                      Stores::non_temporal);
  } else {
    filter_transpose<From, To, Cast, register_bytes>(from, to, filters, rows, columns);
  }
}

/// @tparam register_bytes  the width of the vector registers.
template <int register_bytes = NHWC_REGISTER_BYTES>
constexpr cpu::FilterKernels make_filter_kernels() {
  return {{transpose_elements<std::uint8_t, register_bytes>, transpose_elements<std::uint16_t, register_bytes>,
           transpose_elements<std::uint32_t, register_bytes>, transpose_elements<std::uint64_t, register_bytes>,
           transpose_elements<Element16, register_bytes>},
          {transpose_elements_in_place<std::uint8_t, register_bytes>,
           transpose_elements_in_place<std::uint16_t, register_bytes>,
           transpose_elements_in_place<std::uint32_t, register_bytes>,
           transpose_elements_in_place<std::uint64_t, register_bytes>,
           transpose_elements_in_place<Element16, register_bytes>},
          transpose_and_cast<float, std::uint16_t, FloatToBFloat16, register_bytes>,
          transpose_and_cast<float, std::uint16_t, FloatToHalf, register_bytes>,
          transpose_and_cast<std::uint16_t, float, BFloat16ToFloat, register_bytes>,
          transpose_and_cast<std::uint16_t, float, HalfToFloat, register_bytes>};
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
