// Makes the table of softmax kernels of one level. The including file chooses the instruction set first.
#pragma once

#include <cstdint>

#include "cpu/softmax_kernels.h"
#include "torch_nhwc/cpu/level.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {
namespace softmax {

using Index = std::int64_t;

// Some rows side by side, one in each lane of a register of `width` bytes.
template <int width>
struct Lanes {
  typedef float Floats __attribute__((vector_size(width)));
  typedef std::int32_t Bits __attribute__((vector_size(width)));
  static constexpr Index count = width / static_cast<int>(sizeof(float));

  static NHWC_ALWAYS_INLINE Floats all(float value) { return Floats{} + value; }
  static NHWC_ALWAYS_INLINE Floats load(const float* from) {
    Floats values;
    std::memcpy(&values, from, sizeof(values));
    return values;
  }
  static NHWC_ALWAYS_INLINE void store(float* to, Floats values) { std::memcpy(to, &values, sizeof(values)); }

  // Not by `detail::bits_as`: a template's argument loses the attribute that makes a vector.
  static NHWC_ALWAYS_INLINE Bits as_bits(Floats values) {
    Bits bits;
    std::memcpy(&bits, &values, sizeof(bits));
    return bits;
  }
  static NHWC_ALWAYS_INLINE Floats as_floats(Bits bits) {
    Floats values;
    std::memcpy(&values, &bits, sizeof(values));
    return values;
  }

  // Within 1 unit in the last place; infinities and not-a-number as they should be.
  static NHWC_ALWAYS_INLINE Floats exp(Floats x) {
    // Beyond these the result is 0 or infinite. A comparison with not-a-number is false, which keeps it.
    x = x < all(-105.0f) ? all(-105.0f) : x;
    x = x > all(90.0f) ? all(90.0f) : x;
    // x = n * log(2) + r with a whole n: adding 1.5 * 2^23 rounds, and leaves n in the lowest bits.
    const Floats rounder = all(12582912.0f);
    const Floats shifted = x * 1.44269504f + rounder, n = shifted - rounder;
    const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    // 2^n in two steps, each of which is a normal number, so that the result may be subnormal.
    const Bits power = as_bits(shifted) - as_bits(rounder), half = power >> 1;
    return p * as_floats((half + 127) << 23) * as_floats((power - half + 127) << 23);
  }

  // Of numbers from 1 on, within 1 unit in the last place. Not-a-number stays what it is.
  static NHWC_ALWAYS_INLINE Floats log(Floats x) {
    // x = 2^n * (1 + f), with 1 + f between the square roots of 1/2 and 2.
    const Bits bits = as_bits(x), n = (bits - 0x3F3504F3) >> 23;
    const Floats f = as_floats(bits - (n << 23)) - 1.0f;
    const Floats rounder = all(12582912.0f), power = as_floats(as_bits(rounder) + n) - rounder;
    Floats p = f * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    const Floats square = f * f;
    const Floats small = p * f * square + power * -2.12194440e-4f - square * 0.5f;
    return x == x ? f + small + power * 0.693359375f : x;
  }

  template <bool logarithm>
  static NHWC_ALWAYS_INLINE void forward(float* values, Index channels, Index stride) {
    Floats most = load(values);
    for (Index c = 1; c < channels; ++c) {
      const Floats x = load(values + c * stride);
      most = x > most ? x : most;
    }
    Floats sum = all(0.0f);
    for (Index c = 0; c < channels; ++c) {
      const Floats power = exp(load(values + c * stride) - most);
      if (!logarithm) store(values + c * stride, power);
      sum += power;
    }
    const Floats last = logarithm ? log(sum) : 1.0f / sum;
    for (Index c = 0; c < channels; ++c) {
      const Floats x = load(values + c * stride);
      store(values + c * stride, logarithm ? x - most - last : x * last);
    }
  }

  template <bool logarithm>
  static NHWC_ALWAYS_INLINE void backward(float* gradients, const float* outputs, Index channels, Index stride) {
    Floats sum = all(0.0f);
    for (Index c = 0; c < channels; ++c) {
      const Floats gradient = load(gradients + c * stride);
      sum += logarithm ? gradient : gradient * load(outputs + c * stride);
    }
    for (Index c = 0; c < channels; ++c) {
      const Floats gradient = load(gradients + c * stride), output = load(outputs + c * stride);
      store(gradients + c * stride, logarithm ? gradient - exp(output) * sum : (gradient - sum) * output);
    }
  }
};

template <bool logarithm>
void forward(float* values, Index channels, Index rows) {
  using Wide = Lanes<NHWC_REGISTER_BYTES>;
  Index row = 0;
  for (; row + Wide::count <= rows; row += Wide::count) Wide::template forward<logarithm>(values + row, channels, rows);
  for (; row < rows; ++row) Lanes<sizeof(float)>::forward<logarithm>(values + row, channels, rows);
}

template <bool logarithm>
void backward(float* gradients, const float* outputs, Index channels, Index rows) {
  using Wide = Lanes<NHWC_REGISTER_BYTES>;
  Index row = 0;
  for (; row + Wide::count <= rows; row += Wide::count) {
    Wide::template backward<logarithm>(gradients + row, outputs + row, channels, rows);
  }
  for (; row < rows; ++row) {
    Lanes<sizeof(float)>::backward<logarithm>(gradients + row, outputs + row, channels, rows);
  }
}

constexpr cpu::SoftmaxKernels make_kernels() {
  return {forward<false>, forward<true>, backward<false>, backward<true>};
}

}  // namespace softmax
}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
