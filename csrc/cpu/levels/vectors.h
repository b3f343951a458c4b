// Registers full of numbers, and elements loaded into them and stored from them with a cast.
#pragma once

#include "torch_nhwc/casts.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

struct BFloat16 {
  std::uint16_t bits;
};
struct Half {
  std::uint16_t bits;
};

/// The type that sums of an element type are in.
template <typename Element>
struct RealOf {
  using Type = float;
};
template <>
struct RealOf<double> {
  using Type = double;
};
template <typename Element>
using Real = typename RealOf<Element>::Type;

template <typename Number>
struct VectorOf {
  static constexpr int lanes = NHWC_REGISTER_BYTES / static_cast<int>(sizeof(Number));
  typedef Number Type __attribute__((vector_size(NHWC_REGISTER_BYTES)));
};
template <typename Number>
using Vector = typename VectorOf<Number>::Type;

/// As many 16-bit elements as a register has floats, and their bits in a float's width.
typedef std::uint16_t NarrowBits __attribute__((vector_size(NHWC_REGISTER_BYTES / 2)));
typedef std::uint32_t WideBits __attribute__((vector_size(NHWC_REGISTER_BYTES)));

template <typename Number>
NHWC_ALWAYS_INLINE Vector<Number> load(const Number* source) {
  Vector<Number> result;
  std::memcpy(&result, source, sizeof(result));
  return result;
}

template <typename Number>
NHWC_ALWAYS_INLINE void store(Number* destination, Vector<Number> value) {
  std::memcpy(destination, &value, sizeof(value));
}

NHWC_ALWAYS_INLINE Vector<float> load(const BFloat16* source) {
  NarrowBits bits;
  std::memcpy(&bits, source, sizeof(bits));
  return detail::bits_as<Vector<float>>(__builtin_convertvector(bits, WideBits) << 16);
}

NHWC_ALWAYS_INLINE void store(BFloat16* destination, Vector<float> value) {
  const auto bits = detail::bits_as<WideBits>(value);
  const WideBits rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  const auto is_number = detail::bits_as<WideBits>(value == value);
  const NarrowBits narrow = __builtin_convertvector((rounded & is_number) | (0x7FC0 & ~is_number), NarrowBits);
  std::memcpy(destination, &narrow, sizeof(narrow));
}

NHWC_ALWAYS_INLINE Vector<float> load(const Half* source) {
#if NHWC_X86_LEVEL >= 3
  // Not the plain intrinsic: GCC warns of the register that it leaves uninitialised.
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
  return reinterpret_cast<Vector<float>>(_mm512_maskz_cvtph_ps(0xFFFF, halves));
#elif NHWC_X86_LEVEL == 2
  return reinterpret_cast<Vector<float>>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))));
#else
  Vector<float> result;
  for (int lane = 0; lane < VectorOf<float>::lanes; ++lane) result[lane] = HalfToFloat()(source[lane].bits);
  return result;
#endif
}

NHWC_ALWAYS_INLINE void store(Half* destination, Vector<float> value) {
#if NHWC_X86_LEVEL >= 3
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(destination),
                      _mm512_maskz_cvtps_ph(0xFFFF, reinterpret_cast<__m512>(value), _MM_FROUND_TO_NEAREST_INT));
#elif NHWC_X86_LEVEL == 2
  _mm_storeu_si128(reinterpret_cast<__m128i*>(destination),
                   _mm256_cvtps_ph(reinterpret_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT));
#else
  for (int lane = 0; lane < VectorOf<float>::lanes; ++lane) destination[lane].bits = FloatToHalf()(value[lane]);
#endif
}

NHWC_ALWAYS_INLINE float load_one(const float* source) { return *source; }
NHWC_ALWAYS_INLINE double load_one(const double* source) { return *source; }
NHWC_ALWAYS_INLINE float load_one(const BFloat16* source) { return BFloat16ToFloat()(source->bits); }
NHWC_ALWAYS_INLINE float load_one(const Half* source) { return HalfToFloat()(source->bits); }

NHWC_ALWAYS_INLINE void store_one(float* destination, float value) { *destination = value; }
NHWC_ALWAYS_INLINE void store_one(double* destination, double value) { *destination = value; }
NHWC_ALWAYS_INLINE void store_one(BFloat16* destination, float value) { destination->bits = FloatToBFloat16()(value); }
NHWC_ALWAYS_INLINE void store_one(Half* destination, float value) { destination->bits = FloatToHalf()(value); }

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
