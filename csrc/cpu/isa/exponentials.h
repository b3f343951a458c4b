// Exponentials, logarithms, and what is made of them, of registers of floats.
#pragma once

#include "cpu/isa/vectors.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

// Exponentials and logarithms reduce their argument and have the polynomials of expf and logf in Cephes (S. Moshier,
// Methods and Programs for Mathematical Functions, 1989; netlib.org/cephes). ln(2) is a sum of two floats of which
// the first has so few bits that its multiples are exact.
constexpr float ln2_high = 0.693359375f, ln2_low = -2.12194440e-4f;

/// Returns e^x, within 2 units in the last place, of numbers that are not positive, -inf and NaN included.
NHWC_ALWAYS_INLINE Vector<float> exponential(Vector<float> x) {
  constexpr float least = -104.5f;  // whose exponential is less than half of the smallest denormal
  x = x < least ? broadcast(least) : x;
  // Adding 1.5 * 2^23 rounds to an integer, in the low bits. Further added are the exponent of 1, and 2^shift, which
  // keeps the power of two out of the denormals until the last multiplication.
  constexpr float shift = 60, magic = 0x1.8p23f + 127 + shift;
  const Vector<float> shifted = x * 0x1.715476p0f + magic, n = shifted - magic;
  const Vector<float> r = x - n * ln2_high - n * ln2_low;
  Vector<float> polynomial = r * 1.9875691500e-4f + 1.3981999507e-3f;
  polynomial = polynomial * r + 8.3334519073e-3f;
  polynomial = polynomial * r + 4.1665795894e-2f;
  polynomial = polynomial * r + 1.6666665459e-1f;
  polynomial = polynomial * r + 5.0000001201e-1f;
  polynomial = polynomial * (r * r) + r + 1.0f;
  return polynomial * detail::bits_as<Vector<float>>(detail::bits_as<Bits>(shifted) << 23) * 0x1p-60f;
}

/// Returns ln(x), within 2 units in the last place, of finite numbers from 1 on and of NaN.
NHWC_ALWAYS_INLINE Vector<float> logarithm(Vector<float> x) {
  constexpr std::uint32_t root_of_half = 0x3F3504F3;
  // x = 2^n * m, where m is between the roots of 1/2 and of 2.
  const Bits offset = detail::bits_as<Bits>(x) - root_of_half;
  const Vector<float> n = __builtin_convertvector(detail::bits_as<Integers>(offset >> 23), Vector<float>);
  const Vector<float> m = detail::bits_as<Vector<float>>(detail::bits_as<Bits>(x) - (offset & 0xFF800000)) - 1.0f;
  Vector<float> polynomial = m * 7.0376836292e-2f - 1.1514610310e-1f;
  polynomial = polynomial * m + 1.1676998740e-1f;
  polynomial = polynomial * m - 1.2420140846e-1f;
  polynomial = polynomial * m + 1.4249322787e-1f;
  polynomial = polynomial * m - 1.6668057665e-1f;
  polynomial = polynomial * m + 2.0000714765e-1f;
  polynomial = polynomial * m - 2.4999993993e-1f;
  polynomial = polynomial * m + 3.3333331174e-1f;
  const Vector<float> square = m * m;
  const Vector<float> result = m + (polynomial * m * square + n * ln2_low - 0.5f * square) + n * ln2_high;
  return x == x ? result : x;
}

/// The same of one number.
NHWC_ALWAYS_INLINE float exponential(float x) { return exponential(broadcast(x))[0]; }

/// 1 / (1 + e^-y), and what is missing to 1.
template <typename Value>
struct Sigmoid {
  Value value, rest;
};

template <typename Value>
NHWC_ALWAYS_INLINE Sigmoid<Value> sigmoid(Value y) {
  const Value power = exponential(y > Value{} ? -y : y), larger = 1 / (1 + power), smaller = power * larger;
  return {y < Value{} ? smaller : larger, y < Value{} ? larger : smaller};
}

/// The standard normal distribution at a number: the probability of less, and e^(-y^2 / 2).
template <typename Value>
struct Normal {
  Value probability, power;
};

/// The error function is formula 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions (1964), whose
/// error is at most 1.5e-7. oneDNN computes GELU by it, too.
template <typename Value>
NHWC_ALWAYS_INLINE Normal<Value> normal_distribution(Value y) {
  const Value x = (y < Value{} ? -y : y) * 0.70710678118654752f, t = 1 / (1 + x * 0.3275911f),
              power = exponential(y * y * -0.5f);
  Value sum = t * 1.061405429f - 1.453152027f;
  sum = sum * t + 1.421413741f;
  sum = sum * t - 0.284496736f;
  sum = sum * t + 0.254829592f;
  const Value beyond = sum * t * power * 0.5f;
  return {y < Value{} ? beyond : 1 - beyond, power};
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
