// The passes of group norm for one instruction set.
//
// Rows are processed by the period: as many rows as fill whole pairs of registers, so that a loop over a period has no
// remainder for any number of channels. Parameters and sums are repeated for each channel of a period, in the order of
// the elements in registers.
#pragma once

#include "cpu/isa/vectors.h"
#include "cpu/norm_kernels.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

constexpr int most_periods_at_once = 8;  // which share one load of parameters and sums

template <typename Element>
std::int64_t period_of(std::int64_t channels) {
  std::int64_t divisor = pair_size<Element>;
  while (channels % divisor != 0) divisor /= 2;  // it is a power of two
  return channels * (pair_size<Element> / divisor);
}

template <typename Element>
void spread(const double* values, std::int64_t channels, std::int64_t period, void* out) {
  auto* to = static_cast<Real<Element>*>(out);
  for (std::int64_t k = 0; k < period; k += channels) {
    for (std::int64_t c = 0; c < channels; ++c) to[slot_of<Element>(k + c)] = static_cast<Real<Element>>(values[c]);
  }
}

/// Adds up the sums of a period to sums of channels.
template <typename Element>
void fold(const Real<Element>* sums, std::int64_t period, std::int64_t channels, double* folded) {
  for (std::int64_t c = 0; c < channels; ++c) folded[c] = static_cast<double>(sums[slot_of<Element>(c)]);
  for (std::int64_t k = channels; k < period; k += channels) {
    for (std::int64_t c = 0; c < channels; ++c) folded[c] += static_cast<double>(sums[slot_of<Element>(k + c)]);
  }
}

/// Calls `pairs(at, step, k)` for pairs of registers, `step` elements apart, and `single(at, k)` for the elements of
/// the last, incomplete period: they begin with element `at`, and their parameters and sums are at `k`. The template
/// argument of `pairs` is the number of periods that it takes. Before each of these, `touch(at, count)` is called.
template <typename Element, int periods_at_once, typename Pairs, typename Single, typename Touch>
NHWC_ALWAYS_INLINE void for_each(std::int64_t count, std::int64_t channels, const Pairs& pairs, const Single& single,
                                 const Touch& touch) {
  const std::int64_t period = period_of<Element>(channels), rows = period / channels;
  std::int64_t row = 0;
  for (; row + periods_at_once * rows <= count; row += periods_at_once * rows) {
    touch(row * channels, periods_at_once * period);
    for (std::int64_t k = 0; k < period; k += pair_size<Element>) {
      pairs.template operator()<periods_at_once>(row * channels + k, period, k);
    }
  }
  for (; row + rows <= count; row += rows) {
    for (std::int64_t k = 0; k < period; k += pair_size<Element>) {
      pairs.template operator()<1>(row * channels + k, period, k);
    }
  }
  for (std::int64_t k = 0; k < (count - row) * channels; ++k) single(row * channels + k, slot_of<Element>(k));
}

/// Returns whether periods are read in order although several are read at once.
template <typename Element>
bool is_in_order(std::int64_t channels) {
  return period_of<Element>(channels) == pair_size<Element>;
}

/// Calls the same in a pass that writes rows, row after row: memory is then twice as fast.
template <typename Element, typename Pairs, typename Single>
NHWC_ALWAYS_INLINE void for_each_written(std::int64_t count, std::int64_t channels, const Pairs& pairs,
                                         const Single& single) {
  const auto nothing = [](std::int64_t, std::int64_t) {};
  if (is_in_order<Element>(channels)) {
    for_each<Element, most_periods_at_once>(count, channels, pairs, single, nothing);
  } else {
    for_each<Element, 1>(count, channels, pairs, single, nothing);
  }
}

/// Calls the same in a pass that adds up rows. Several at once share the access to their sums, but are first read in
/// order, for the sake of memory: at most as many as the first-level cache then has.
template <typename Element, typename Pairs, typename Single, typename Touch>
NHWC_ALWAYS_INLINE void for_each_summed(std::int64_t count, std::int64_t channels, const Pairs& pairs,
                                        const Single& single, const Touch& touch) {
  const auto bytes = period_of<Element>(channels) * static_cast<std::int64_t>(sizeof(Element));
  if (is_in_order<Element>(channels)) {
    for_each<Element, most_periods_at_once>(count, channels, pairs, single, [](std::int64_t, std::int64_t) {});
  } else if (most_periods_at_once * bytes <= 16384) {
    for_each<Element, most_periods_at_once>(count, channels, pairs, single, touch);
  } else {
    for_each<Element, most_periods_at_once / 2>(count, channels, pairs, single, touch);
  }
}

/// Reads one byte of each cache line.
template <typename Element>
NHWC_ALWAYS_INLINE void touch_lines(const Element* first, std::int64_t count) {
  constexpr int line = 64;
  const auto* bytes = reinterpret_cast<const volatile char*>(first);
  for (std::int64_t at = 0; at < count * static_cast<std::int64_t>(sizeof(Element)); at += line) (void)bytes[at];
}

/// Returns the rows of a block: enough that the work per block is negligible.
template <typename Element>
std::int64_t block_rows(std::int64_t channels) {
  const std::int64_t multiple = most_periods_at_once * (period_of<Element>(channels) / channels),
                     wanted = 32768 / channels;
  return (wanted < 256 ? 256 : wanted) / multiple * multiple + multiple;
}

/// Adds numbers by Dekker's summation, which keeps what rounding lost: one number may be far larger than all others.
template <typename Number>
NHWC_ALWAYS_INLINE void add(Number* sum, Number* lost, Vector<Number> value) {
  const Vector<Number> before = load_vector(sum), after = before + value;
  store_vector(sum, after);
  store_vector(lost, load_vector(lost) + (value - (after - before)));
}

/// Adds what was lost. If a sum is infinite, that is infinite or not-a-number, and the sum stays.
template <typename Number>
void make_up(Number* sums, const Number* lost, std::int64_t count) {
  for (std::int64_t k = 0; k < count; ++k) sums[k] += lost[k] - lost[k] == 0 ? lost[k] : 0;
}

/// Adds up the deviations from `shift`, and their squares.
template <typename Element>
void sum_block(const Element* rows, std::int64_t count, std::int64_t channels, const Real<Element>* shift,
               Real<Element>* sum, Real<Element>* square, Real<Element>* lost) {
  using Number = Real<Element>;
  constexpr int lanes = VectorOf<Number>::lanes;
  const std::int64_t period = period_of<Element>(channels);
  for (std::int64_t k = 0; k < period; ++k) sum[k] = square[k] = lost[k] = lost[period + k] = 0;
  for_each_summed<Element>(
      count, channels,
      [=]<int periods>(std::int64_t at, std::int64_t step, std::int64_t k) {
        const Pair<Number> origin = load_pair(shift + k);
        Pair<Number> sums{}, squares{};
        for (int row = 0; row < periods; ++row) {
          const Pair<Number> value = load_pair(rows + at + row * step);
          const Vector<Number> first = value.first - origin.first, second = value.second - origin.second;
          sums.first += first;
          sums.second += second;
          squares.first += first * first;
          squares.second += second * second;
        }
        add(sum + k, lost + k, sums.first);
        add(sum + k + lanes, lost + k + lanes, sums.second);
        add(square + k, lost + period + k, squares.first);
        add(square + k + lanes, lost + period + k + lanes, squares.second);
      },
      [=](std::int64_t at, std::int64_t k) {
        const Number value = load_one(rows + at) - shift[k];
        sum[k] += value;
        square[k] += value * value;
      },
      [=](std::int64_t at, std::int64_t elements) { touch_lines(rows + at, elements); });
  make_up(sum, lost, period);
  make_up(square, lost + period, period);
}

inline bool is_finite(double value) { return value - value == 0; }

/// Computes the moments of channels whose deviations are not finite anew, as plain sums of doubles: deviations from an
/// infinite mean are not-a-number, and floats overflow early. The mean of infinite values of one sign is infinite.
template <typename Element>
[[gnu::noinline]] void correct_moments(const Element* rows, std::int64_t count, std::int64_t channels, double* mean,
                                       double* deviations, double* sums) {
  double* squares = sums + channels;
  for (std::int64_t c = 0; c < channels; ++c) sums[c] = squares[c] = 0;
  for (std::int64_t row = 0; row < count; ++row) {
    for (std::int64_t c = 0; c < channels; ++c) sums[c] += static_cast<double>(load_one(rows + row * channels + c));
  }
  for (std::int64_t c = 0; c < channels; ++c) sums[c] /= static_cast<double>(count);
  for (std::int64_t row = 0; row < count; ++row) {
    for (std::int64_t c = 0; c < channels; ++c) {
      const double deviation = static_cast<double>(load_one(rows + row * channels + c)) - sums[c];
      squares[c] += deviation * deviation;
    }
  }
  for (std::int64_t c = 0; c < channels; ++c) {
    if (!is_finite(deviations[c])) mean[c] = sums[c], deviations[c] = squares[c];
  }
}

/// Computes moments by provisional means. Within a block, deviations from a guess of each channel's mean and their
/// squares are added up. The guess is the mean so far, at first that of a few rows. If it was so bad that squares would
/// cancel, the block is added up again around its own mean. Blocks are merged by the rule of Chan,
/// Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
template <typename Element>
void moments(const void* data, std::int64_t count, std::int64_t channels, double* mean, double* deviations,
             void* scratch) {
  using Number = Real<Element>;
  const auto* rows = static_cast<const Element*>(data);
  const std::int64_t period = period_of<Element>(channels), block = block_rows<Element>(channels);
  auto* block_sum = static_cast<double*>(scratch);
  double* block_square = block_sum + channels;
  auto* shift = reinterpret_cast<Number*>(block_square + channels);
  Number *sum = shift + period, *square = sum + period, *lost = square + period;
  for (std::int64_t seen = 0; seen < count; seen += block) {
    const std::int64_t taken = seen + block < count ? block : count - seen;
    const Element* first = rows + seen * channels;
    if (seen == 0) {
      const std::int64_t few = taken < 16 ? taken : 16;
      for (std::int64_t c = 0; c < channels; ++c) mean[c] = deviations[c] = 0;
      for (std::int64_t row = 0; row < few; ++row) {
        const Element* from = first + taken / few * row * channels;
        for (std::int64_t c = 0; c < channels; ++c) mean[c] += static_cast<double>(load_one(from + c));
      }
      for (std::int64_t c = 0; c < channels; ++c) mean[c] /= static_cast<double>(few);
    }
    const double here = static_cast<double>(taken), before = static_cast<double>(seen);
    const double of_here = 1 / here, part = here / (here + before), weight = before * part;
    for (bool is_good = false, is_second = false; !is_good; is_second = true) {
      spread<Element>(is_second ? block_sum : mean, channels, period, shift);
      sum_block(first, taken, channels, shift, sum, square, lost);
      fold<Element>(sum, period, channels, block_sum);
      fold<Element>(square, period, channels, block_square);
      int bad = 0;
      for (std::int64_t c = 0; c < channels; ++c) {
        const double moved = block_sum[c] * of_here, cancelled = block_sum[c] * moved;
        bad |= block_square[c] < 2 * cancelled;
        block_sum[c] = static_cast<double>(shift[slot_of<Element>(c)]) + moved;
        block_square[c] -= cancelled;
      }
      is_good = !bad || is_second;
    }
    for (std::int64_t c = 0; c < channels; ++c) {
      const double difference = seen == 0 ? block_sum[c] : block_sum[c] - mean[c];
      mean[c] = seen == 0 ? block_sum[c] : mean[c] + difference * part;
      deviations[c] += block_square[c] + (seen == 0 ? 0 : difference * difference * weight);
    }
  }
  // A mean that is not finite makes the deviations so.
  bool are_finite = true;
  for (std::int64_t c = 0; c < channels; ++c) are_finite &= is_finite(deviations[c]);
  if (!are_finite) correct_moments(rows, count, channels, mean, deviations, block_sum);
}

template <typename Element>
void normalise(const void* data, void* out, std::int64_t count, std::int64_t channels, const void* means,
               const void* scales, const void* shifts) {
  using Number = Real<Element>;
  const auto* rows = static_cast<const Element*>(data);
  auto* to = static_cast<Element*>(out);
  const auto *mean = static_cast<const Number*>(means), *scale = static_cast<const Number*>(scales),
             *shift = static_cast<const Number*>(shifts);
  for_each_written<Element>(
      count, channels,
      [=]<int periods>(std::int64_t at, std::int64_t step, std::int64_t k) {
        const Pair<Number> m = load_pair(mean + k), a = load_pair(scale + k), b = load_pair(shift + k);
        for (int row = 0; row < periods; ++row) {
          const Pair<Number> x = load_pair(rows + at + row * step);
          store_pair(to + at + row * step, Pair<Number>{(x.first - m.first) * a.first + b.first,
                                                        (x.second - m.second) * a.second + b.second});
        }
      },
      [=](std::int64_t at, std::int64_t k) {
        store_one(to + at, (load_one(rows + at) - mean[k]) * scale[k] + shift[k]);
      });
}

template <typename Element>
void backward_sums(const void* gradient, const void* data, std::int64_t count, std::int64_t channels, const void* means,
                   double* sum, double* product, void* scratch) {
  using Number = Real<Element>;
  const auto* grad = static_cast<const Element*>(gradient);
  const auto* rows = static_cast<const Element*>(data);
  const auto* mean = static_cast<const Number*>(means);
  constexpr int lanes = VectorOf<Number>::lanes;
  const std::int64_t period = period_of<Element>(channels), block = block_rows<Element>(channels);
  auto* folded = static_cast<double*>(scratch);
  auto* sums = reinterpret_cast<Number*>(folded + channels);
  Number *products = sums + period, *lost = products + period;
  for (std::int64_t begin = 0; begin < count; begin += block) {
    const std::int64_t taken = begin + block < count ? block : count - begin;
    const Element *g = grad + begin * channels, *x = rows + begin * channels;
    for (std::int64_t k = 0; k < period; ++k) sums[k] = products[k] = lost[k] = lost[period + k] = 0;
    const auto add_pairs = [=]<int periods>(std::int64_t at, std::int64_t step, std::int64_t k) {
      const Pair<Number> m = load_pair(mean + k);
      Pair<Number> s{}, p{};
      for (int row = 0; row < periods; ++row) {
        const Pair<Number> from = load_pair(g + at + row * step), value = load_pair(x + at + row * step);
        s.first += from.first;
        s.second += from.second;
        p.first += from.first * (value.first - m.first);
        p.second += from.second * (value.second - m.second);
      }
      add(sums + k, lost + k, s.first);
      add(sums + k + lanes, lost + k + lanes, s.second);
      add(products + k, lost + period + k, p.first);
      add(products + k + lanes, lost + period + k + lanes, p.second);
    };
    const auto add_one = [=](std::int64_t at, std::int64_t k) {
      const Number value = load_one(g + at);
      sums[k] += value;
      products[k] += value * (load_one(x + at) - mean[k]);
    };
    for_each_summed<Element>(taken, channels, add_pairs, add_one, [=](std::int64_t at, std::int64_t elements) {
      touch_lines(g + at, elements);
      touch_lines(x + at, elements);
    });
    make_up(sums, lost, period);
    make_up(products, lost + period, period);
    fold<Element>(sums, period, channels, folded);
    for (std::int64_t c = 0; c < channels; ++c) sum[c] += folded[c];
    fold<Element>(products, period, channels, folded);
    for (std::int64_t c = 0; c < channels; ++c) product[c] += folded[c];
  }
}

template <typename Element>
void backward(const void* gradient, const void* data, void* out, std::int64_t count, std::int64_t channels,
              const void* means, const void* of_grads, const void* of_rows, const void* shifts) {
  using Number = Real<Element>;
  const auto* grad = static_cast<const Element*>(gradient);
  const auto* rows = static_cast<const Element*>(data);
  auto* to = static_cast<Element*>(out);
  const auto *mean = static_cast<const Number*>(means), *by_grad = static_cast<const Number*>(of_grads),
             *by_row = static_cast<const Number*>(of_rows), *shift = static_cast<const Number*>(shifts);
  for_each_written<Element>(
      count, channels,
      [=]<int periods>(std::int64_t at, std::int64_t step, std::int64_t k) {
        const Pair<Number> m = load_pair(mean + k), a = load_pair(by_grad + k), p = load_pair(by_row + k),
                           b = load_pair(shift + k);
        for (int row = 0; row < periods; ++row) {
          const Pair<Number> g = load_pair(grad + at + row * step), x = load_pair(rows + at + row * step);
          store_pair(to + at + row * step,
                     Pair<Number>{g.first * a.first + ((x.first - m.first) * p.first + b.first),
                                  g.second * a.second + ((x.second - m.second) * p.second + b.second)});
        }
      },
      [=](std::int64_t at, std::int64_t k) {
        store_one(to + at, load_one(grad + at) * by_grad[k] + ((load_one(rows + at) - mean[k]) * by_row[k] + shift[k]));
      });
}

template <typename Element>
constexpr cpu::NormKernels make_norm_kernels() {
  return {period_of<Element>, spread<Element>,        moments<Element>,
          normalise<Element>, backward_sums<Element>, backward<Element>};
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
