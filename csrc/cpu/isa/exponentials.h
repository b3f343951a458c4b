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

/// Returns 1 / (1 + e^-y).
template <typename Value>
NHWC_ALWAYS_INLINE Value sigmoid(Value y) {
  const Value power = exponential(y > Value{} ? -y : y), whole = 1 / (1 + power);
  return y < Value{} ? power * whole : whole;
}

/// Returns the probability that a number of the standard normal distribution is below `y`: half of the complementary
/// error function of -y / sqrt(2), by the polynomials of Cephes (ndtrf.c).
template <typename Value>
NHWC_ALWAYS_INLINE Value normal_distribution(Value y) {
  const auto polynomial = [](Value at, const auto&... coefficients) {
    Value sum{};
    ((sum = sum * at + coefficients), ...);
    return sum;
  };
  const Value zero{}, x = (y < zero ? -y : y) * 0.70710678118654752f, square = x * x;
  // The error function up to 1, and the complementary one beyond.
  const Value inner = x * polynomial(square, 7.853861353153693e-5f, -8.010193625184903e-4f, 5.188327685732524e-3f,
                                     -2.685381193529856e-2f, 1.128358514861418e-1f, -3.761262582423300e-1f,
                                     1.128379165726710f);
  const Value inverse = 1 / (x < 1.0f ? zero + 1.0f : x), at = inverse * inverse;
  const Value near = polynomial(at, 2.326819970068386e-2f, -1.387039388740657e-1f, 3.687424674597105e-1f,
                                -5.824733027278666e-1f, 6.210004621745983e-1f, -4.944515323274145e-1f,
                                3.404879937665872e-1f, -2.741127028184656e-1f, 5.638259427386472e-1f),
              far = polynomial(at, -1.047766399936249e+1f, 1.297719955372516e+1f, -7.495518717768503f,
                               2.921019019210786f, -1.015265279202700f, 4.218463358204948e-1f, -2.820767439740514e-1f,
                               5.641895067754075e-1f);
  const Value outer = exponential(-square) * inverse * (x < 2.0f ? near : far);
  const Value complement = x < 1.0f ? 1.0f - inner : outer;  // of x, which is positive
  return y < zero ? 0.5f * complement : 1.0f - 0.5f * complement;
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
