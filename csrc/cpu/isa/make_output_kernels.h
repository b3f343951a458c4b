// A residual and an activation for one instruction set.
#pragma once

#include "cpu/isa/activations.h"
#include "cpu/output_kernels.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

template <cpu::ActivationKind kind>
void finish(float* values, const float* residual, std::int64_t count, double parameter) {
  constexpr std::int64_t lanes = VectorOf<float>::lanes;
  const Activation<float, kind> activation(parameter);
  const auto slope = static_cast<float>(parameter);
  std::int64_t k = 0;
  for (; k + lanes <= count; k += lanes) {
    Vector<float> y = load_vector(values + k);
    if (residual) y += load_vector(residual + k);
    store_vector(values + k, activation.value(y, Vector<float>{} + slope));
  }
  for (; k < count; ++k) values[k] = activation.value(residual ? values[k] + residual[k] : values[k], slope);
}

constexpr cpu::OutputKernels make_output_kernels() {
  using enum cpu::ActivationKind;
  return {{finish<none>, finish<relu>, finish<leaky_relu>, finish<silu>, finish<gelu>, finish<gelu_tanh>}};
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
