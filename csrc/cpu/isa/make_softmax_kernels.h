// Softmax and log-softmax over planes for one instruction set: a register has neighbouring pixels of a channel.
#pragma once

#include "cpu/isa/exponentials.h"
#include "cpu/softmax_kernels.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

constexpr int softmax_lanes = VectorOf<float>::lanes;

static_assert(cpu::softmax_pixels % softmax_lanes == 0);

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
