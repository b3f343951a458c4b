// Products of pixels of few channels for one instruction set: a register has neighbouring channels of a pixel.
#pragma once

#include "cpu/isa/vectors.h"
#include "cpu/pointwise_kernels.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

constexpr int pointwise_lanes = VectorOf<float>::lanes;

/// Adds neighbours that are `distance` lanes apart: of `a` in the lanes without this bit, of `b` in the others.
template <int distance, int... lanes>
NHWC_ALWAYS_INLINE Vector<float> merged(Vector<float> a, Vector<float> b, std::integer_sequence<int, lanes...>) {
  return __builtin_shufflevector(a, b, (lanes & distance ? lanes + pointwise_lanes : lanes)...) +
         __builtin_shufflevector(a, b, (lanes & distance ? (lanes ^ distance) + pointwise_lanes : lanes ^ distance)...);
}

/// Adds the upper half of a register to the lower one, until four numbers are left.
template <typename Register, int... four>
NHWC_ALWAYS_INLINE auto folded(const Register& values, std::integer_sequence<int, four...>) {
  constexpr int lanes = sizeof(Register) / sizeof(float);
  if constexpr (lanes == 16) {
    const auto half = __builtin_shufflevector(values, values, four..., (four + 4)...) +
                      __builtin_shufflevector(values, values, (four + 8)..., (four + 12)...);
    return folded(half, std::integer_sequence<int, four...>());
  } else if constexpr (lanes == 8) {
    return __builtin_shufflevector(values, values, four...) + __builtin_shufflevector(values, values, (four + 4)...);
  } else {
    return values;
  }
}

/// Computes few outputs of many inputs: those of a pixel, as one register of four.
template <typename Element, int outputs>
void reduce_pixels(const void* input, std::int64_t pixels, std::int64_t inputs, const float* weights, const float* bias,
                   void* output) {
  constexpr std::make_integer_sequence<int, pointwise_lanes> lanes;
  const auto* x = static_cast<const Element*>(input);
  auto* out = static_cast<Element*>(output);
  const std::int64_t whole = inputs / pointwise_lanes * pointwise_lanes;
  for (std::int64_t p = 0; p < pixels; ++p, x += inputs, out += outputs) {
    Vector<float> sums[cpu::most_few] = {};
    for (std::int64_t i = 0; i < whole; i += pointwise_lanes) {
      const Vector<float> values = load_vector(x + i);
      for (int o = 0; o < outputs; ++o) sums[o] += values * load_vector(weights + o * inputs + i);
    }
    const auto four = folded(merged<2>(merged<1>(sums[0], sums[1], lanes), merged<1>(sums[2], sums[3], lanes), lanes),
                             std::make_integer_sequence<int, 4>());
    for (int o = 0; o < outputs; ++o) {
      float sum = bias[o] + four[o];
      for (std::int64_t i = whole; i < inputs; ++i) sum += load_one(x + i) * weights[o * inputs + i];
      store_one(out + o, sum);
    }
  }
}

/// Computes many outputs of few inputs.
template <typename Element, int inputs>
void spread_pixels(const void* input, std::int64_t pixels, std::int64_t outputs, const float* weights,
                   const float* bias, void* output) {
  const auto* x = static_cast<const Element*>(input);
  auto* out = static_cast<Element*>(output);
  for (std::int64_t p = 0; p < pixels; ++p, x += inputs, out += outputs) {
    float values[inputs];
    for (int i = 0; i < inputs; ++i) values[i] = load_one(x + i);
    std::int64_t o = 0;
    for (; o + pointwise_lanes <= outputs; o += pointwise_lanes) {
      Vector<float> sum = load_vector(bias + o);
      for (int i = 0; i < inputs; ++i) sum += values[i] * load_vector(weights + i * outputs + o);
      store_vector(out + o, sum);
    }
    for (; o < outputs; ++o) {
      float sum = bias[o];
      for (int i = 0; i < inputs; ++i) sum += values[i] * weights[i * outputs + o];
      store_one(out + o, sum);
    }
  }
}

template <typename Element>
constexpr cpu::PointwiseKernels make_pointwise_kernels() {
  if constexpr (std::is_same<Element, double>::value) {
    return {};
  } else {
    return {
        {reduce_pixels<Element, 1>, reduce_pixels<Element, 2>, reduce_pixels<Element, 3>, reduce_pixels<Element, 4>},
        {spread_pixels<Element, 1>, spread_pixels<Element, 2>, spread_pixels<Element, 3>, spread_pixels<Element, 4>}};
  }
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
