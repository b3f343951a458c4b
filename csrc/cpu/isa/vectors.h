// Registers of numbers, into and from which elements are loaded and stored with a cast.
#pragma once

#include "torch_nhwc/casts.h"

// Unrolls the loop that follows, whose number of rounds is a constant of at most 16.
#if defined(__clang__)
#define NHWC_UNROLL _Pragma("unroll")
#else
#define NHWC_UNROLL _Pragma("GCC unroll 16")
#endif

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

struct BFloat16 {
  std::uint16_t bits;
};
struct Half {
  std::uint16_t bits;
};

/// The type of sums of an element type.
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

template <typename Number>
NHWC_ALWAYS_INLINE Vector<Number> load_vector(const Number* source) {
  Vector<Number> result;
  std::memcpy(&result, source, sizeof(result));
  return result;
}

template <typename Number>
NHWC_ALWAYS_INLINE void store_vector(Number* destination, Vector<Number> value) {
  std::memcpy(destination, &value, sizeof(value));
}

typedef std::uint32_t Bits __attribute__((vector_size(NHWC_REGISTER_BYTES)));
typedef std::int32_t Integers __attribute__((vector_size(NHWC_REGISTER_BYTES)));

/// Rounded to a bfloat16, in the upper half.
NHWC_ALWAYS_INLINE Bits rounded(Vector<float> value) {
  const auto bits = detail::bits_as<Bits>(value);
  return value == value ? bits + 0x7FFF + (bits >> 16 & 1) : Bits{} + 0x7FC00000;
}

// Without instructions for halves their code is long, and a call is little of its time.
#if NHWC_X86_LEVEL >= 2
#define NHWC_INLINE_HALVES NHWC_ALWAYS_INLINE
#else
#define NHWC_INLINE_HALVES [[gnu::noinline]] inline
#endif

NHWC_INLINE_HALVES Vector<float> load_halves(const Half* source) {
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

NHWC_INLINE_HALVES void store_halves(Half* destination, Vector<float> value) {
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

typedef std::uint16_t HalfOfBits __attribute__((vector_size(NHWC_REGISTER_BYTES / 2)));

NHWC_ALWAYS_INLINE Vector<float> load_vector(const BFloat16* source) {
  HalfOfBits bits;
  std::memcpy(&bits, source, sizeof(bits));
  return detail::bits_as<Vector<float>>(__builtin_convertvector(bits, Bits) << 16);
}

NHWC_ALWAYS_INLINE void store_vector(BFloat16* destination, Vector<float> value) {
  const auto bits = __builtin_convertvector(rounded(value) >> 16, HalfOfBits);
  std::memcpy(destination, &bits, sizeof(bits));
}

NHWC_ALWAYS_INLINE Vector<float> load_vector(const Half* source) { return load_halves(source); }
NHWC_ALWAYS_INLINE void store_vector(Half* destination, Vector<float> value) { store_halves(destination, value); }

template <typename Number>
NHWC_ALWAYS_INLINE Vector<Number> broadcast(Number value) {
  return value - Vector<Number>{};
}

/// Two registers of neighbours: the first half and the second, or the even bfloat16s and the odd ones, since two
/// instructions separate and join them so.
template <typename Number>
struct Pair {
  Vector<Number> first, second;
};

template <typename Number>
NHWC_ALWAYS_INLINE Pair<Number> operator+(const Pair<Number>& a, const Pair<Number>& b) {
  return {a.first + b.first, a.second + b.second};
}
template <typename Number>
NHWC_ALWAYS_INLINE Pair<Number> operator-(const Pair<Number>& a, const Pair<Number>& b) {
  return {a.first - b.first, a.second - b.second};
}
template <typename Number>
NHWC_ALWAYS_INLINE Pair<Number> operator*(const Pair<Number>& a, const Pair<Number>& b) {
  return {a.first * b.first, a.second * b.second};
}

template <typename Number>
NHWC_ALWAYS_INLINE Pair<Number> load_pair(const Number* source) {
  return {load_vector(source), load_vector(source + VectorOf<Number>::lanes)};
}
NHWC_ALWAYS_INLINE Pair<float> load_pair(const Half* source) {
  return {load_vector(source), load_vector(source + VectorOf<float>::lanes)};
}
NHWC_ALWAYS_INLINE Pair<float> load_pair(const BFloat16* source) {
  Bits bits;
  std::memcpy(&bits, source, sizeof(bits));
  return {detail::bits_as<Vector<float>>(bits << 16), detail::bits_as<Vector<float>>(bits & 0xFFFF0000)};
}

template <typename Element>
NHWC_ALWAYS_INLINE void store_pair(Element* destination, const Pair<Real<Element>>& values) {
  store_vector(destination, values.first);
  store_vector(destination + VectorOf<Real<Element>>::lanes, values.second);
}
NHWC_ALWAYS_INLINE void store_pair(BFloat16* destination, const Pair<float>& values) {
  const Bits bits = rounded(values.first) >> 16 | (rounded(values.second) & 0xFFFF0000);
  std::memcpy(destination, &bits, sizeof(bits));
}

template <typename Element>
constexpr std::int64_t pair_size = 2 * VectorOf<Real<Element>>::lanes;

template <typename Element>
constexpr bool is_pair_in_order = !std::is_same_v<Element, BFloat16>;

/// Returns the place of element `k` in a pair.
template <typename Element>
constexpr std::int64_t place_in_pair(std::int64_t k) {
  return is_pair_in_order<Element> ? k : k / 2 + k % 2 * (pair_size<Element> / 2);
}

typedef float HalfOfFloats __attribute__((vector_size(NHWC_REGISTER_BYTES / 2)));

/// Loads as many elements as a register has floats.
template <typename Element>
NHWC_ALWAYS_INLINE Pair<double> load_doubles(const Element* source) {
  constexpr int lanes = VectorOf<double>::lanes;
  if constexpr (std::is_same_v<Element, double>) {
    return {load_vector(source), load_vector(source + lanes)};
  } else {
    float values[2 * lanes];
    store_vector(values, load_vector(source));
    HalfOfFloats first, second;
    std::memcpy(&first, values, sizeof(first));
    std::memcpy(&second, values + lanes, sizeof(second));
    return {__builtin_convertvector(first, Vector<double>), __builtin_convertvector(second, Vector<double>)};
  }
}

/// Adds the upper half of a register to the lower one, until one number is left.
template <typename Number, int bytes = NHWC_REGISTER_BYTES, typename Register>
NHWC_ALWAYS_INLINE Number total_of(Register values) {
  if constexpr (bytes == sizeof(Number)) {
    return values[0];
  } else {
    typedef Number Half __attribute__((vector_size(bytes / 2)));
    Half halves[2];
    std::memcpy(halves, &values, sizeof(halves));
    return total_of<Number, bytes / 2>(halves[0] + halves[1]);
  }
}

NHWC_ALWAYS_INLINE float load_one(const float* source) { return *source; }
NHWC_ALWAYS_INLINE double load_one(const double* source) { return *source; }
NHWC_ALWAYS_INLINE float load_one(const BFloat16* source) { return BFloat16ToFloat()(source->bits); }
[[gnu::noinline]] inline float load_one(const Half* source) { return HalfToFloat()(source->bits); }

NHWC_ALWAYS_INLINE void store_one(float* destination, float value) { *destination = value; }
NHWC_ALWAYS_INLINE void store_one(double* destination, double value) { *destination = value; }
NHWC_ALWAYS_INLINE void store_one(BFloat16* destination, float value) { destination->bits = FloatToBFloat16()(value); }
[[gnu::noinline]] inline void store_one(Half* destination, float value) { destination->bits = FloatToHalf()(value); }

/// Loads a register, or one number.
template <typename Value, typename Element>
NHWC_ALWAYS_INLINE Value load_as(const Element* source) {
  if constexpr (std::is_same_v<Value, Real<Element>>) {
    return load_one(source);
  } else {
    return load_vector(source);
  }
}
template <typename Value, typename Element>
NHWC_ALWAYS_INLINE void store_as(Element* destination, Value value) {
  if constexpr (std::is_same_v<Value, Real<Element>>) {
    store_one(destination, value);
  } else {
    store_vector(destination, value);
  }
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
