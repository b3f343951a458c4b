// Casts between float and the 16-bit floating types, as bits, for `filter_transpose`. Rounded to nearest, ties to even;
// subnormals and infinities are exact, and not-a-number stays not-a-number.
#pragma once

#include <cstdint>
#include <cstring>

#include "torch_nhwc/cpu/level.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {
namespace detail {

template <typename To, typename From>
NHWC_ALWAYS_INLINE To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "bits are kept");
  To result;
  std::memcpy(&result, &value, sizeof(To));
  return result;
}

}  // namespace detail

/// float to the bits of a bfloat16.
struct FloatToBFloat16 {
  NHWC_ALWAYS_INLINE std::uint16_t operator()(float value) const {
    const auto bits = detail::bits_as<std::uint32_t>(value);
    const std::uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    return static_cast<std::uint16_t>(value != value ? 0x7FC0 : rounded);
  }
  void operator()(const float* source, std::uint16_t* destination, std::int64_t count) const {
    std::int64_t i = 0;
#if NHWC_X86_LEVEL >= 5
    // The instruction treats subnormals as zero. If a result is zero, the run is checked again.
    constexpr std::int64_t run = 512;
    for (std::int64_t end; (end = i + run < count ? i + run : count / 16 * 16) > i; i = end) {
      __m256i least = _mm256_set1_epi16(0x7FFF);
      for (std::int64_t k = i; k < end; k += 16) {
        const __m256bh cast = _mm512_cvtneps_pbh(_mm512_loadu_ps(source + k));
        std::memcpy(destination + k, &cast, sizeof(cast));
        const __m256i magnitudes = _mm256_and_si256(detail::bits_as<__m256i>(cast), _mm256_set1_epi16(0x7FFF));
        least = _mm256_min_epu16(least, magnitudes);
      }
      if (_mm256_testn_epi16_mask(least, least) == 0) continue;
      for (std::int64_t k = i; k < end; k += 16) {
        if (_mm512_fpclass_ps_mask(_mm512_loadu_ps(source + k), /*denormal=*/0x20) == 0) continue;
        for (int lane = 0; lane < 16; ++lane) destination[k + lane] = (*this)(source[k + lane]);
      }
    }
#endif
    const std::int64_t left = count - i;
    for (std::int64_t k = 0; k < left; ++k) destination[i + k] = (*this)(source[i + k]);
  }
};

/// The bits of a bfloat16 to float.
struct BFloat16ToFloat {
  NHWC_ALWAYS_INLINE float operator()(std::uint16_t bits) const {
    return detail::bits_as<float>(static_cast<std::uint32_t>(bits) << 16);
  }
};

/// float to the bits of an IEEE half.
struct FloatToHalf {
  NHWC_ALWAYS_INLINE std::uint16_t operator()(float value) const {
    const auto bits = detail::bits_as<std::uint32_t>(value);
    const std::uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
    // Adding one half moves a subnormal half's units to the last places, and rounds them.
    const std::uint32_t subnormal =
        detail::bits_as<std::uint32_t>(detail::bits_as<float>(magnitude) + 0.5f) - 0x3F000000;
    const std::uint32_t normal = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
    const std::uint32_t finite = magnitude < 0x38800000 ? subnormal : normal;
    const std::uint32_t large = magnitude > 0x7F800000 ? 0x7E00 : 0x7C00;
    return static_cast<std::uint16_t>(sign | (magnitude < 0x477FF000 ? finite : large));
  }
  void operator()(const float* source, std::uint16_t* destination, std::int64_t count) const {
    std::int64_t i = 0;
#if NHWC_X86_LEVEL >= 3
    for (; i + 16 <= count; i += 16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(destination + i),
                          _mm512_maskz_cvtps_ph(0xFFFF, _mm512_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT));
    }
#elif NHWC_X86_LEVEL >= 2
    for (; i + 8 <= count; i += 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(destination + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT));
    }
#endif
    const std::int64_t left = count - i;
    for (std::int64_t k = 0; k < left; ++k) destination[i + k] = (*this)(source[i + k]);
  }
};

/// The bits of an IEEE half to float.
struct HalfToFloat {
  NHWC_ALWAYS_INLINE float operator()(std::uint16_t half) const {
    const std::uint32_t sign = (half & 0x8000u) << 16, magnitude = half & 0x7FFFu;
    const auto subnormal = detail::bits_as<std::uint32_t>(detail::bits_as<float>(0x3F000000 | magnitude) - 0.5f);
    const std::uint32_t normal = (magnitude << 13) + (112u << 23);
    const std::uint32_t finite = magnitude < 0x0400 ? subnormal : normal;
    return detail::bits_as<float>(sign | (magnitude < 0x7C00 ? finite : 0x7F800000 | magnitude << 13));
  }
  void operator()(const std::uint16_t* source, float* destination, std::int64_t count) const {
    std::int64_t i = 0;
#if NHWC_X86_LEVEL >= 2
    for (; i + 8 <= count; i += 8) {
      _mm256_storeu_ps(destination + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i))));
    }
#endif
    const std::int64_t left = count - i;
    for (std::int64_t k = 0; k < left; ++k) destination[i + k] = (*this)(source[i + k]);
  }
};

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
