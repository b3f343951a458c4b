// Softmax and log-softmax over planes for one instruction set: a register has neighbouring pixels of a channel.
#pragma once

#include "cpu/isa/vectors.h"
#include "cpu/softmax_kernels.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

constexpr int softmax_lanes = VectorOf<float>::lanes;

static_assert(cpu::softmax_pixels % softmax_lanes == 0);

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

/// Returns the largest value of each pixel. It may be any where one is not a number.
NHWC_ALWAYS_INLINE Vector<float> largest(const float* x, std::int64_t channels, std::int64_t pixels) {
  Vector<float> most = load_vector(x);
  for (std::int64_t c = 1; c < channels; ++c) {
    const Vector<float> value = load_vector(x + c * pixels);
    most = value > most ? value : most;
  }
  return most;
}

inline void softmax_of_planes(float* planes, std::int64_t channels, std::int64_t pixels) {
  for (std::int64_t p = 0; p < pixels; p += softmax_lanes) {
    float* x = planes + p;
    const Vector<float> most = largest(x, channels, pixels);
    Vector<float> sum = {};
    for (std::int64_t c = 0; c < channels; ++c) {
      const Vector<float> power = exponential(load_vector(x + c * pixels) - most);
      store_vector(x + c * pixels, power);
      sum += power;
    }
    const Vector<float> factor = 1.0f / sum;
    for (std::int64_t c = 0; c < channels; ++c) store_vector(x + c * pixels, load_vector(x + c * pixels) * factor);
  }
}

inline void log_softmax_of_planes(float* planes, std::int64_t channels, std::int64_t pixels) {
  for (std::int64_t p = 0; p < pixels; p += softmax_lanes) {
    float* x = planes + p;
    const Vector<float> most = largest(x, channels, pixels);
    Vector<float> sum = {};
    for (std::int64_t c = 0; c < channels; ++c) sum += exponential(load_vector(x + c * pixels) - most);
    const Vector<float> log_sum = logarithm(sum);
    for (std::int64_t c = 0; c < channels; ++c)
      store_vector(x + c * pixels, load_vector(x + c * pixels) - most - log_sum);
  }
}

inline void softmax_gradient_of_planes(float* grad, const float* output, std::int64_t channels, std::int64_t pixels) {
  for (std::int64_t p = 0; p < pixels; p += softmax_lanes) {
    Vector<float> sum = {};
    for (std::int64_t k = p; k < channels * pixels; k += pixels) sum += load_vector(grad + k) * load_vector(output + k);
    for (std::int64_t k = p; k < channels * pixels; k += pixels) {
      store_vector(grad + k, (load_vector(grad + k) - sum) * load_vector(output + k));
    }
  }
}

inline void log_softmax_gradient_of_planes(float* grad, const float* output, std::int64_t channels,
                                           std::int64_t pixels) {
  for (std::int64_t p = 0; p < pixels; p += softmax_lanes) {
    Vector<float> sum = {};
    for (std::int64_t k = p; k < channels * pixels; k += pixels) sum += load_vector(grad + k);
    for (std::int64_t k = p; k < channels * pixels; k += pixels) {
      store_vector(grad + k, load_vector(grad + k) - exponential(load_vector(output + k)) * sum);
    }
  }
}

constexpr cpu::SoftmaxKernels make_softmax_kernels() {
  return {softmax_of_planes, log_softmax_of_planes, softmax_gradient_of_planes, log_softmax_gradient_of_planes};
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
