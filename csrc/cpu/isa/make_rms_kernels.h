// RMS norm over the channels of rows for one instruction set: a register has neighbouring channels.
#pragma once

#include "cpu/isa/activations.h"
#include "cpu/rms_kernels.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

/// Returns the sum of a row's squares.
template <typename Element>
NHWC_ALWAYS_INLINE Real<Element> square_of(const Element* x, std::int64_t channels) {
  using Number = Real<Element>;
  constexpr int lanes = VectorOf<Number>::lanes;
  Vector<Number> sums[2] = {};
  std::int64_t c = 0;
  for (; c + 2 * lanes <= channels; c += 2 * lanes) {
    const Pair<Number> values = load_pair(x + c);  // in any order
    sums[0] += values.first * values.first;
    sums[1] += values.second * values.second;
  }
  if (c + lanes <= channels) {
    const Vector<Number> last = load_vector(x + c);
    sums[0] += last * last;
    c += lanes;
  }
  Number sum = total_of<Number>(sums[0] + sums[1]);
  for (; c < channels; ++c) sum += load_one(x + c) * load_one(x + c);
  return sum;
}

/// What rows are multiplied by to have the length that the norm gives them, and the reciprocal sums of their squares,
/// or 0 where the length is less than eps. For several rows at once, none of which waits for another's root.
template <typename Element>
struct RmsFactors {
  using Number = Real<Element>;
  static constexpr int most = 16;
  Number factor[most], inverse[most];

  /// Returns how many rows are in a first-level cache at once.
  static std::int64_t rows(const cpu::RmsRows& shape) {
    const std::int64_t fit = (std::int64_t{16} << 10) / (shape.channels * static_cast<std::int64_t>(sizeof(Element)));
    return fit < 1 ? 1 : fit < most ? fit : most;
  }
  void compute(const cpu::RmsRows& shape, const Element* x, std::int64_t count) {
    const auto eps = static_cast<Number>(shape.eps), scale = static_cast<Number>(shape.scale);
    Number squares[most];
    for (std::int64_t i = 0; i < count; ++i) squares[i] = square_of(x + i * shape.channels, shape.channels);
    for (std::int64_t i = 0; i < count; ++i) {
      Number length;
      if constexpr (std::is_same_v<Number, double>) {
        length = __builtin_sqrt(squares[i]);
      } else {
        length = __builtin_sqrtf(squares[i]);
      }
      factor[i] = scale / (length < eps ? eps : length);
      inverse[i] = length < eps ? 0 : 1 / squares[i];
    }
  }
};

/// A row of the input, and what the passes know of it.
template <typename Element, cpu::ActivationKind kind>
struct RmsRow {
  using Number = Real<Element>;
  static constexpr int lanes = VectorOf<Number>::lanes;

  const Element* x;
  const Number *weight, *bias;
  Number factor;
  Activation<Number, kind> activation = Activation<Number, kind>(0);

  RmsRow(const cpu::RmsRows& shape, const Element* x, Number factor)
      : x(x),
        weight(static_cast<const Number*>(shape.weight)),
        bias(static_cast<const Number*>(shape.bias)),
        factor(factor) {}

  template <typename Value>
  NHWC_ALWAYS_INLINE Value before_activation(std::int64_t c) const {
    return load_as<Value>(x + c) * factor * load_as<Value>(weight + c) + load_as<Value>(bias + c);
  }

  template <typename Value>
  NHWC_ALWAYS_INLINE void write(std::int64_t c, Element* out) const {
    store_as<Value>(out + c, activation.value(before_activation<Value>(c), Value{}));
  }

  /// Adds the gradients of weight and bias, writes that of the row before the norm, and returns its product with it.
  template <typename Value>
  NHWC_ALWAYS_INLINE Value add_gradients(std::int64_t c, const Element* grad, Number* weight_sums, Number* bias_sums,
                                         Number* weighted) const {
    const Value of_sum = activation.gradient(load_as<Value>(grad + c), before_activation<Value>(c), Value{});
    const Value values = load_as<Value>(x + c), of_row = of_sum * load_as<Value>(weight + c);
    store_as<Value>(bias_sums + c, load_as<Value>(bias_sums + c) + of_sum);
    store_as<Value>(weight_sums + c, load_as<Value>(weight_sums + c) + of_sum * (values * factor));
    store_as<Value>(weighted + c, of_row);
    return of_row * values;
  }

  template <typename Value>
  NHWC_ALWAYS_INLINE void write_gradient(std::int64_t c, const Number* weighted, Number along, Element* out) const {
    store_as<Value>(out + c, factor * (load_as<Value>(weighted + c) - load_as<Value>(x + c) * along));
  }
};

/// Calls `work(row, inverse, number)` for all rows.
template <typename Element, cpu::ActivationKind kind, typename Work>
NHWC_ALWAYS_INLINE void for_each_row(const cpu::RmsRows& shape, const void* rows, const Work& work) {
  const auto* x = static_cast<const Element*>(rows);
  RmsFactors<Element> factors;
  const std::int64_t at_once = factors.rows(shape);
  for (std::int64_t first = 0; first < shape.count; first += at_once) {
    const std::int64_t count = first + at_once < shape.count ? at_once : shape.count - first;
    factors.compute(shape, x + first * shape.channels, count);
    for (std::int64_t i = 0; i < count; ++i) {
      work(RmsRow<Element, kind>(shape, x + (first + i) * shape.channels, factors.factor[i]), factors.inverse[i],
           first + i);
    }
  }
}

template <typename Element, cpu::ActivationKind kind>
void rms_forward(const cpu::RmsRows& shape, const void* rows, void* out) {
  using Row = RmsRow<Element, kind>;
  using Number = Real<Element>;
  for_each_row<Element, kind>(shape, rows, [&](const Row& row, Number, std::int64_t i) {
    auto* to = static_cast<Element*>(out) + i * shape.channels;
    std::int64_t c = 0;
    for (; c + Row::lanes <= shape.channels; c += Row::lanes) row.template write<Vector<Number>>(c, to);
    for (; c < shape.channels; ++c) row.template write<Number>(c, to);
  });
}

template <typename Element, cpu::ActivationKind kind>
void rms_backward(const cpu::RmsRows& shape, const void* grad, const void* rows, void* out, void* weight_sums,
                  void* bias_sums, void* scratch) {
  using Row = RmsRow<Element, kind>;
  using Number = Real<Element>;
  auto *of_weight = static_cast<Number*>(weight_sums), *of_bias = static_cast<Number*>(bias_sums),
       *weighted = static_cast<Number*>(scratch);
  for_each_row<Element, kind>(shape, rows, [&](const Row& row, Number inverse, std::int64_t i) {
    const auto* g = static_cast<const Element*>(grad) + i * shape.channels;
    Vector<Number> products = {};
    std::int64_t c = 0;
    for (; c + Row::lanes <= shape.channels; c += Row::lanes) {
      products += row.template add_gradients<Vector<Number>>(c, g, of_weight, of_bias, weighted);
    }
    Number product = total_of<Number>(products);
    for (; c < shape.channels; ++c) product += row.template add_gradients<Number>(c, g, of_weight, of_bias, weighted);
    if (!out) return;
    auto* to = static_cast<Element*>(out) + i * shape.channels;
    const Number along = product * inverse;
    for (c = 0; c + Row::lanes <= shape.channels; c += Row::lanes) {
      row.template write_gradient<Vector<Number>>(c, weighted, along, to);
    }
    for (; c < shape.channels; ++c) row.template write_gradient<Number>(c, weighted, along, to);
  });
}

template <typename Element>
constexpr cpu::RmsKernels make_rms_kernels() {
  constexpr auto none = cpu::ActivationKind::none, silu = cpu::ActivationKind::silu;
  if constexpr (std::is_same_v<Element, double>) {  // for which there are no exponentials
    return {{rms_forward<Element, none>, rms_backward<Element, none>}, {}};
  } else {
    return {{rms_forward<Element, none>, rms_backward<Element, none>},
            {rms_forward<Element, silu>, rms_backward<Element, silu>}};
  }
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
