// Products of planes for one instruction set: a register has neighbouring pixels of a channel.
#pragma once

#include "cpu/isa/vectors.h"
#include "cpu/pointwise_kernels.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

/// Writes the planes of some outputs, so that each input is loaded once for all of them.
template <int outputs>
void multiply_planes_by(const float* input, std::int64_t pixels, std::int64_t inputs, const float* weights,
                        const float* bias, float* out) {
  for (std::int64_t p = 0; p < pixels; p += VectorOf<float>::lanes) {
    Vector<float> sums[outputs];
    NHWC_UNROLL
    for (int o = 0; o < outputs; ++o) sums[o] = broadcast(bias[o]);
    for (std::int64_t c = 0; c < inputs; ++c) {
      const Vector<float> values = load_vector(input + c * pixels + p);
      NHWC_UNROLL
      for (int o = 0; o < outputs; ++o) sums[o] += values * weights[o * inputs + c];
    }
    NHWC_UNROLL
    for (int o = 0; o < outputs; ++o) store_vector(out + o * pixels + p, sums[o]);
  }
}

inline void multiply_planes(const float* input, std::int64_t pixels, std::int64_t inputs, std::int64_t outputs,
                            const float* weights, const float* bias, float* out) {
  constexpr decltype(&multiply_planes_by<1>) by_outputs[] = {multiply_planes_by<1>, multiply_planes_by<2>,
                                                             multiply_planes_by<3>, multiply_planes_by<4>};
  for (std::int64_t o = 0; o < outputs; o += 4) {
    const std::int64_t count = outputs - o < 4 ? outputs - o : 4;
    by_outputs[count - 1](input, pixels, inputs, weights + o * inputs, bias + o, out + o * pixels);
  }
}

inline void accumulate_planes(const float* grad, const float* input, std::int64_t pixels, std::int64_t inputs,
                              std::int64_t outputs, float* sums) {
  constexpr int lanes = VectorOf<float>::lanes;
  for (std::int64_t o = 0; o < outputs; ++o, grad += pixels) {
    for (std::int64_t c = 0; c <= inputs; ++c, sums += lanes) {
      Vector<float> sum = load_vector(sums);
      for (std::int64_t p = 0; p < pixels; p += lanes) {
        sum += c == inputs ? load_vector(grad + p) : load_vector(grad + p) * load_vector(input + c * pixels + p);
      }
      store_vector(sums, sum);
    }
  }
}

constexpr cpu::PointwiseKernels make_pointwise_kernels() {
  return {VectorOf<float>::lanes, multiply_planes, accumulate_planes};
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
