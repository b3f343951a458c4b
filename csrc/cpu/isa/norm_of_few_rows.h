// The passes of group norm over a sample of few rows. To arrange parameters and sums for strips would take longer than
// to compute it: instead, each register of a group's channels goes down all rows, with its parameters and sums in
// registers.
#pragma once

#include "cpu/isa/activations.h"
#include "cpu/norm_kernels.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

using cpu::NormRows;

/// Scale and shift of each channel: a norm is (rows - mean) * scale + shift. `mean` is rounded to a number of the
/// kernels, and what it lost is in the shift. The slope is the one of the activation.
template <typename Number, cpu::ActivationKind kind>
struct Affine {
  Number* __restrict mean, * __restrict scale, * __restrict shift, * __restrict slope;

  int arrays;  // those that are read: the mean, scale, shift, slope

  /// Without an activation, those of the first `alone` are read.
  Affine(const NormRows& shape, const cpu::NormNumbers& numbers, double* scratch, std::int64_t padded, int alone = 3)
      : mean(reinterpret_cast<Number*>(scratch)),
        scale(mean + padded),
        shift(scale + padded),
        slope(shift + padded),
        arrays(has_slopes(kind)                    ? 4
               : kind == cpu::ActivationKind::none ? alone
                                                   : 3) {
    const std::int64_t of_group = shape.channels / shape.groups;
    for (std::int64_t g = 0, first = 0; g < shape.groups; ++g, first += of_group) {
      const double average = numbers.mean[g], r = numbers.rstd[g];
      const auto rounded = static_cast<Number>(average);
      const double lost = static_cast<double>(rounded) - average;
      const std::int64_t end = first + of_group;
      for (std::int64_t k = first; k < end; ++k) mean[k] = rounded;
      for (std::int64_t k = first; arrays > 1 && k < end; ++k) scale[k] = static_cast<Number>(r * numbers.weight[k]);
      for (std::int64_t k = first; arrays > 2 && k < end; ++k) {
        shift[k] = static_cast<Number>(numbers.bias[k] + lost * (r * numbers.weight[k]));
      }
    }
    for (std::int64_t k = 0; has_slopes(kind) && k < shape.channels; ++k)
      slope[k] = static_cast<Number>(numbers.slope[k]);
  }

  Number* end(std::int64_t padded) const { return slope + padded; }

  /// Puts the numbers into the order of a strip.
  template <typename Strip>
  void arrange(const Strip& strip) const {
    Number* const all[] = {mean, scale, shift, slope};
    for (int each = 0; each < arrays; ++each) strip.arrange(all[each]);
  }
};

template <typename Element>
std::int64_t bytes_of(const NormRows& shape) {
  return shape.count * shape.channels * static_cast<std::int64_t>(sizeof(Element));
}

/// Returns whether rows are few: of groups that fill registers, or of few numbers at all. Where the channels do not
/// fill pairs of registers, strips are longer. Columns of a larger sample are too far apart for the caches.
template <typename Element>
bool has_few_rows(const NormRows& shape) {
  const bool fills_registers = shape.channels >= shape.groups * VectorOf<Real<Element>>::lanes;
  if (shape.count * shape.channels <= (fills_registers ? 128 : 64)) return true;
  return fills_registers && shape.count <= (shape.channels % pair_size<Element> == 0 ? 16 : 64) &&
         bytes_of<Element>(shape) <= 3 << 15;
}

/// Returns whether a group is one run of neighbours in memory, or has so many in each row.
template <typename Element>
bool has_runs_of(const NormRows& shape, std::int64_t bytes) {
  const auto run = shape.channels / shape.groups * static_cast<std::int64_t>(sizeof(Element));
  return shape.groups == 1 ? shape.count * shape.channels > 128 : run >= bytes;
}

/// Returns whether a sample of few rows is also written by the registers of each group.
template <typename Element>
bool is_written_by_groups(const NormRows& shape) {
  return has_few_rows<Element>(shape) && (bytes_of<Element>(shape) <= 8192 || has_runs_of<Element>(shape, 512));
}

/// Calls `work<Value>(channel, fresh)` for each register of a group's channels; in a group that is narrower than one,
/// for each number. The last register overlaps the one before it, and its lanes from `fresh` on are its own.
template <typename Element, typename Work>
NHWC_ALWAYS_INLINE void for_each_register(std::int64_t group, std::int64_t of_group, const Work& work) {
  using Number = Real<Element>;
  constexpr std::int64_t lanes = VectorOf<Number>::lanes;
  std::int64_t k = group * of_group;
  const std::int64_t end = k + of_group;
  for (; k + lanes <= end; k += lanes) work.template operator()<Vector<Number>>(k, 0);
  if (k < end && of_group >= lanes) {
    work.template operator()<Vector<Number>>(end - lanes, k - (end - lanes));
  } else {
    for (; k < end; ++k) work.template operator()<Number>(k, 0);
  }
}

/// Calls `column<Value>(channel)(place)` for each register of a group, at its places in all rows. A small sample goes
/// down the columns, whose parameters stay in registers; a larger one row after row, as it is in memory.
template <typename Element, typename Column>
NHWC_ALWAYS_INLINE void for_each_place(const NormRows& shape, std::int64_t group, const Column& column) {
  const auto [count, channels, groups] = shape;
  const std::int64_t elements = count * channels, of_group = channels / groups;
  if (bytes_of<Element>(shape) <= 8192) {
    for_each_register<Element>(group, of_group, [&]<typename Value>(std::int64_t k, std::int64_t) {
      const auto work = column.template operator()<Value>(k);
      for (std::int64_t at = k; at < elements; at += channels) work(at);
    });
  } else {
    for (std::int64_t row = 0; row < elements; row += channels) {
      for_each_register<Element>(group, of_group, [&]<typename Value>(std::int64_t k, std::int64_t) {
        column.template operator()<Value>(k)(row + k);
      });
    }
  }
}

/// A sum of registers and of single numbers.
template <typename Number>
struct Total {
  Vector<Number> registers{};
  double rest = 0;

  template <typename Value>
  NHWC_ALWAYS_INLINE void add(Value value, std::int64_t fresh) {
    if constexpr (std::is_same_v<Value, Number>) {
      rest += static_cast<double>(value);
    } else if (fresh == 0) {
      registers += value;
    } else {
      for (std::int64_t lane = fresh; lane < VectorOf<Number>::lanes; ++lane) rest += static_cast<double>(value[lane]);
    }
  }
  double value() const { return rest + static_cast<double>(total_of<Number>(registers)); }
};

/// Adds the fresh lanes of a register, or a number, to sums in doubles.
template <typename Number, typename Value>
NHWC_ALWAYS_INLINE void add_each(double* sums, Value value, std::int64_t fresh) {
  if constexpr (std::is_same_v<Value, Number>) {
    *sums += static_cast<double>(value);
  } else {
    constexpr int lanes = VectorOf<Number>::lanes;
    Number values[lanes];
    store_vector(values, value);
    if (fresh == 0) {
      for (int lane = 0; lane < lanes; ++lane) sums[lane] += static_cast<double>(values[lane]);
    } else {
      for (std::int64_t lane = fresh; lane < lanes; ++lane) sums[lane] += static_cast<double>(values[lane]);
    }
  }
}

/// Computes each group's mean and the sum of squared deviations from it in two passes.
template <typename Element>
void moments_of_few_rows(const NormRows& shape, const Element* rows, double* means, double* deviations) {
  using Number = Real<Element>;
  const auto [count, channels, groups] = shape;
  const std::int64_t of_group = channels / groups, elements = count * channels;
  const double share = 1 / static_cast<double>(count * of_group);
  for (std::int64_t g = 0; g < groups; ++g) {
    Total<Number> sum, moved, squares;
    for_each_register<Element>(g, of_group, [&]<typename Value>(std::int64_t k, std::int64_t fresh) {
      Value of_rows{};
      for (std::int64_t at = k; at < elements; at += channels) of_rows += load_as<Value>(rows + at);
      sum.add(of_rows, fresh);
    });
    const auto center = static_cast<Number>(sum.value() * share);
    for_each_register<Element>(g, of_group, [&]<typename Value>(std::int64_t k, std::int64_t fresh) {
      Value of_rows{}, squares_of_rows{};
      for (std::int64_t at = k; at < elements; at += channels) {
        const Value deviation = load_as<Value>(rows + at) - center;
        of_rows += deviation;
        squares_of_rows += deviation * deviation;
      }
      moved.add(of_rows, fresh);
      squares.add(squares_of_rows, fresh);
    });
    const double rounded = moved.value() * share;
    means[g] = static_cast<double>(center) + rounded;
    deviations[g] = squares.value() - moved.value() * rounded;
  }
}

/// out = activation((rows - mean) * scale + shift + residual), where the mean is the group's.
template <typename Element, cpu::ActivationKind kind>
void normalise_few_rows(const NormRows& shape, const Element* rows, const Element* residual, Element* out,
                        const double* means, const Affine<Real<Element>, kind>& by,
                        const Activation<Real<Element>, kind>& activation) {
  using Number = Real<Element>;
  for (std::int64_t g = 0; g < shape.groups; ++g) {
    const auto mean = static_cast<Number>(means[g]);
    for_each_place<Element>(shape, g, [&]<typename Value>(std::int64_t k) {
      return [&, a = load_as<Value>(by.scale + k), b = load_as<Value>(by.shift + k),
              slope = load_as<Value>(by.slope + k)](std::int64_t at) {
        Value y = (load_as<Value>(rows + at) - mean) * a + b;
        if (residual) y += load_as<Value>(residual + at);
        store_as<Value>(out + at, activation.value(y, slope));
      };
    });
  }
}

/// Adds to each channel the sums of g and of g * (rows - mean), where g is the gradient before the activation of
/// (rows - mean) * scale + shift. It is written, unless `before` is null.
template <typename Element, cpu::ActivationKind kind>
void backward_sums_of_few_rows(const NormRows& shape, const Element* grad, const Element* rows, Element* before,
                               const double* means, const Affine<Real<Element>, kind>& by,
                               const Activation<Real<Element>, kind>& activation, double* sum, double* product) {
  using Number = Real<Element>;
  const auto [count, channels, groups] = shape;
  const std::int64_t elements = count * channels;
  for (std::int64_t g = 0; g < groups; ++g) {
    const auto mean = static_cast<Number>(means[g]);
    for_each_register<Element>(g, channels / groups, [&]<typename Value>(std::int64_t k, std::int64_t fresh) {
      const auto a = load_as<Value>(by.scale + k), b = load_as<Value>(by.shift + k),
                 slope = load_as<Value>(by.slope + k);
      Value sums{}, products{};
      for (std::int64_t at = k; at < elements; at += channels) {
        const Value centred = load_as<Value>(rows + at) - mean,
                    from = activation.gradient(load_as<Value>(grad + at), centred * a + b, slope);
        if (before) store_as<Value>(before + at, from);
        sums += from;
        products += from * centred;
      }
      add_each<Number>(sum + k, sums, fresh);
      add_each<Number>(product + k, products, fresh);
    });
  }
}

/// out = g * scale + (rows - mean) * by_row + by_all for the channels of one group, with the same g.
template <typename Element, cpu::ActivationKind kind>
void backward_of_few_rows(const NormRows& shape, std::int64_t group, const Element* grad, const Element* rows,
                          Element* out, Real<Element> mean, const Affine<Real<Element>, kind>& by, Real<Element> by_row,
                          Real<Element> by_all, const Activation<Real<Element>, kind>& activation) {
  for_each_place<Element>(shape, group, [&]<typename Value>(std::int64_t k) {
    return [&, a = load_as<Value>(by.scale + k), b = load_as<Value>(by.shift + k),
            slope = load_as<Value>(by.slope + k)](std::int64_t at) {
      const Value centred = load_as<Value>(rows + at) - mean,
                  from = activation.gradient(load_as<Value>(grad + at), centred * a + b, slope);
      store_as<Value>(out + at, from * a + (centred * by_row + by_all));
    };
  });
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
