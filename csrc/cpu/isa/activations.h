// Activations of registers of numbers, and their derivatives, for one instruction set.
#pragma once

#include "cpu/isa/exponentials.h"
#include "cpu/norm_kernels.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

/// An activation has `value(y, slope)`, and `gradient(grad, y, slope)`, the gradient of its input `y` from that of its
/// output. Both take registers, or single numbers. What is not a number stays so. `parameter` is the one of the kind;
/// the slope is read if the kind `has_slopes`.
template <typename Number, cpu::ActivationKind kind>
struct Activation;

template <typename Number>
struct Activation<Number, cpu::ActivationKind::none> {
  explicit Activation(double) {}
  template <typename Value>
  NHWC_ALWAYS_INLINE Value value(Value y, Value) const {
    return y;
  }
  template <typename Value>
  NHWC_ALWAYS_INLINE Value gradient(Value grad, Value, Value) const {
    return grad;
  }
};

/// Up to a ceiling, which is infinite for ReLU.
template <typename Number>
struct Activation<Number, cpu::ActivationKind::relu> {
  Number ceiling;
  explicit Activation(double parameter) : ceiling(static_cast<Number>(parameter)) {}

  template <typename Value>
  NHWC_ALWAYS_INLINE Value value(Value y, Value) const {
    const Value zero{}, most = zero + ceiling, rectified = y < zero ? zero : y;
    return rectified > most ? most : rectified;
  }
  template <typename Value>
  NHWC_ALWAYS_INLINE Value gradient(Value grad, Value y, Value) const {
    const Value zero{}, most = zero + ceiling, rectified = y <= zero ? zero : grad;
    return y >= most ? zero : rectified;
  }
};

template <typename Number>
struct Activation<Number, cpu::ActivationKind::leaky_relu> {
  explicit Activation(double) {}
  template <typename Value>
  NHWC_ALWAYS_INLINE Value value(Value y, Value slope) const {
    return y > Value{} ? y : y * slope;
  }
  template <typename Value>
  NHWC_ALWAYS_INLINE Value gradient(Value grad, Value y, Value slope) const {
    return y > Value{} ? grad : grad * slope;
  }
};

template <typename Number>
struct Activation<Number, cpu::ActivationKind::silu> {
  explicit Activation(double) {}
  template <typename Value>
  NHWC_ALWAYS_INLINE Value value(Value y, Value) const {
    return y * sigmoid(y).value;
  }
  template <typename Value>
  NHWC_ALWAYS_INLINE Value gradient(Value grad, Value y, Value) const {
    const auto [s, rest] = sigmoid(y);
    return grad * (s * (1 + y * rest));
  }
};

template <typename Number>
struct Activation<Number, cpu::ActivationKind::gelu> {
  explicit Activation(double) {}
  template <typename Value>
  NHWC_ALWAYS_INLINE Value value(Value y, Value) const {
    return y * normal_distribution(y).probability;
  }
  template <typename Value>
  NHWC_ALWAYS_INLINE Value gradient(Value grad, Value y, Value) const {
    constexpr auto density_at_0 = static_cast<Number>(0.3989422804014327);
    const auto [probability, power] = normal_distribution(y);
    return grad * (probability + y * (power * density_at_0));
  }
};

/// GELU by a hyperbolic tangent, (1 + tanh(u)) / 2, which is the sigmoid of 2u.
template <typename Number>
struct Activation<Number, cpu::ActivationKind::gelu_tanh> {
  static constexpr auto twice_root = static_cast<Number>(1.5957691216057308),  // 2 * sqrt(2 / pi)
      cubic = static_cast<Number>(0.044715);
  explicit Activation(double) {}
  template <typename Value>
  NHWC_ALWAYS_INLINE Value value(Value y, Value) const {
    return y * sigmoid(y * (1 + y * y * cubic) * twice_root).value;
  }
  template <typename Value>
  NHWC_ALWAYS_INLINE Value gradient(Value grad, Value y, Value) const {
    const Value square = y * y;
    const auto [s, rest] = sigmoid(y * (1 + square * cubic) * twice_root);
    return grad * (s * (1 + y * rest * ((1 + square * (3 * cubic)) * twice_root)));
  }
};

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
