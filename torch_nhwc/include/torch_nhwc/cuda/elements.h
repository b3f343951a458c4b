// Elements on a GPU, as bits: cast one by one, and packed into the vectors that one access moves.
#pragma once

#include <cstdint>
#include <type_traits>

#include "torch_nhwc/casts.h"
#include "torch_nhwc/cuda/launch.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#endif

namespace nhwc {
namespace cuda {

/// The largest vector that one access moves.
struct alignas(16) Quad {
  std::uint32_t words[4];
};
struct alignas(8) Pair {
  std::uint32_t words[2];
};

namespace detail {

template <unsigned bytes>
using Bits = std::conditional_t<
    bytes == 1, std::uint8_t,
    std::conditional_t<bytes == 2, std::uint16_t,
                       std::conditional_t<bytes == 4, std::uint32_t, std::conditional_t<bytes == 8, Pair, Quad>>>>;

// Converts one element, as bits.
template <Elements elements>
NHWC_HOST_DEVICE Bits<destination_bytes(elements)> cast(const Bits<source_bytes(elements)>& bits) {
  if constexpr (elements == Elements::bfloat16_to_float) {
    return static_cast<std::uint32_t>(bits) << 16;
  } else if constexpr (source_bytes(elements) == destination_bytes(elements)) {
    return bits;
  } else {
#if defined(__CUDA_ARCH__)
    if constexpr (elements == Elements::float_to_bfloat16)
      return __bfloat16_as_ushort(__float2bfloat16_rn(__uint_as_float(bits)));
    if constexpr (elements == Elements::float_to_half) return __half_as_ushort(__float2half_rn(__uint_as_float(bits)));
    if constexpr (elements == Elements::half_to_float) return __float_as_uint(__half2float(__ushort_as_half(bits)));
#else
    if constexpr (elements == Elements::half_to_float) {
      return nhwc::detail::bits_as<std::uint32_t>(HalfToFloat{}(bits));
    } else {
      const auto value = nhwc::detail::bits_as<float>(bits);
      if constexpr (elements == Elements::float_to_bfloat16) return FloatToBFloat16{}(value);
      if constexpr (elements == Elements::float_to_half) return FloatToHalf{}(value);
    }
#endif
  }
}

// Reads and writes an element in its place in a vector of 16 bytes, as words.
template <unsigned bytes>
NHWC_HOST_DEVICE void insert(Quad& vector, unsigned index, const Bits<bytes>& element) {
  if constexpr (bytes == 16) {
    vector = element;
  } else if constexpr (bytes == 8) {
    vector.words[index * 2] = element.words[0];
    vector.words[index * 2 + 1] = element.words[1];
  } else {
    constexpr unsigned in_a_word = 4 / bytes;
    const std::uint32_t bits = static_cast<std::uint32_t>(element) << (index % in_a_word * bytes * 8 % 32);
    std::uint32_t& word = vector.words[index / in_a_word];
    word = index % in_a_word == 0 ? bits : word | bits;
  }
}
NHWC_HOST_DEVICE inline const Quad& as_quad(const Quad& vector) { return vector; }
NHWC_HOST_DEVICE inline Quad as_quad(const Pair& vector) { return {{vector.words[0], vector.words[1], 0, 0}}; }

template <unsigned bytes>
NHWC_HOST_DEVICE Bits<bytes> extract(const Quad& vector, unsigned index) {
  if constexpr (bytes == 16) {
    return vector;
  } else if constexpr (bytes == 8) {
    return {{vector.words[index * 2], vector.words[index * 2 + 1]}};
  } else {
    constexpr unsigned in_a_word = 4 / bytes;
    return static_cast<Bits<bytes>>(vector.words[index / in_a_word] >> (index % in_a_word * bytes * 8 % 32));
  }
}

}  // namespace detail
}  // namespace cuda
}  // namespace nhwc
