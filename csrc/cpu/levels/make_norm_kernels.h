// The passes of group norm for one instruction set.
//
// Rows are taken by the period: as many of them as fill whole registers, so that a loop over a period has no remainder,
// whatever the number of channels. Parameters stand once for each channel of a period.
#pragma once

#include "cpu/levels/vectors.h"
#include "cpu/norm_kernels.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

constexpr std::int64_t rows_at_once = 4;  // as many as share the loads of parameters and sums

template <typename Element>
std::int64_t period_of(std::int64_t channels) {
  std::int64_t divisor = VectorOf<Real<Element>>::lanes;
  while (channels % divisor != 0) divisor /= 2;  // lanes are a power of two
  return channels * (VectorOf<Real<Element>>::lanes / divisor);
}

/// Calls `vectors(at, k)` for the registers and `single(at, k)` for the elements of `size` numbers, of which number `at`
/// has the parameters `k`: the elements are those of the last, incomplete period.
template <typename Element, typename Vectors, typename Single>
NHWC_ALWAYS_INLINE void for_each(std::int64_t size, std::int64_t period, const Vectors& vectors, const Single& single) {
  constexpr int lanes = VectorOf<Real<Element>>::lanes;
  std::int64_t begin = 0;
  for (; begin + rows_at_once * period <= size; begin += rows_at_once * period) {
    for (std::int64_t k = 0; k < period; k += lanes) vectors.template operator()<rows_at_once>(begin + k, k);
  }
  for (; begin + period <= size; begin += period) {
    for (std::int64_t k = 0; k < period; k += lanes) vectors.template operator()<1>(begin + k, k);
  }
  for (std::int64_t k = 0; begin + k < size; ++k) single(begin + k, k);
}

/// The rows of a block: enough that what is done once for a block is little beside it, few enough for sums in float.
template <typename Element>
std::int64_t block_rows(std::int64_t channels, std::int64_t period) {
  const std::int64_t multiple = rows_at_once * (period / channels);
  const std::int64_t wanted = 32768 / (channels * static_cast<std::int64_t>(sizeof(Element)));
  return (wanted < 32 ? 32 : wanted) / multiple * multiple + multiple;
}

/// Sums of a block over the rows, folded from the period's sums.
template <typename Number>
void fold(const Number* sums, std::int64_t period, std::int64_t channels, double* folded) {
  for (std::int64_t c = 0; c < channels; ++c) folded[c] = static_cast<double>(sums[c]);
  for (std::int64_t k = channels; k < period; k += channels) {
    for (std::int64_t c = 0; c < channels; ++c) folded[c] += static_cast<double>(sums[k + c]);
  }
}

template <typename Element>
void sum_block(const Element* rows, std::int64_t size, std::int64_t period, const Real<Element>* shift,
               Real<Element>* sum, Real<Element>* square) {
  using Number = Real<Element>;
  for (std::int64_t k = 0; k < period; ++k) sum[k] = square[k] = 0;
  for_each<Element>(
      size, period,
      [=]<int count>(std::int64_t at, std::int64_t k) {
        const Vector<Number> origin = load(shift + k);
        Vector<Number> sums = load(sum + k), squares = load(square + k);
        for (int row = 0; row < count; ++row) {
          const Vector<Number> value = load(rows + at + row * period) - origin;
          sums += value;
          squares += value * value;
        }
        store(sum + k, sums);
        store(square + k, squares);
      },
      [=](std::int64_t at, std::int64_t k) {
        const Number value = load_one(rows + at) - shift[k];
        sum[k] += value;
        square[k] += value * value;
      });
}

/// The method of provisional means: within a block, sums of deviations, and of their squares, from a guess of each
/// channel's mean; it is the mean so far, and the mean of a few rows before there is one. Where it was a bad guess, so
/// that squares would cancel, the block is summed again around its own mean. Blocks are merged by the rule of Chan, Golub
/// and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
template <typename Element>
void moments(const void* data, std::int64_t count, std::int64_t channels, std::int64_t seen, double* mean,
             double* deviations, void* scratch) {
  using Number = Real<Element>;
  const auto* rows = static_cast<const Element*>(data);
  const std::int64_t period = period_of<Element>(channels), block = block_rows<Element>(channels, period);
  auto* block_sum = static_cast<double*>(scratch);
  double* block_square = block_sum + channels;
  auto* shift = reinterpret_cast<Number*>(block_square + channels);
  Number *sum = shift + period, *square = sum + period;
  for (std::int64_t begin = 0; begin < count; begin += block) {
    const std::int64_t taken = begin + block < count ? block : count - begin;
    const Element* first = rows + begin * channels;
    if (seen == 0) {
      const std::int64_t few = taken < 8 ? taken : 8;
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
      for (std::int64_t k = 0; k < period; k += channels) {
        for (std::int64_t c = 0; c < channels; ++c) {
          shift[k + c] = static_cast<Number>(is_second ? block_sum[c] : mean[c]);
        }
      }
      sum_block(first, taken * channels, period, shift, sum, square);
      fold(sum, period, channels, block_sum);
      fold(square, period, channels, block_square);
      int bad = 0;
      for (std::int64_t c = 0; c < channels; ++c) {
        const double moved = block_sum[c] * of_here, lost = block_sum[c] * moved;
        bad |= block_square[c] < 1.25 * lost;
        block_sum[c] = static_cast<double>(shift[c]) + moved;
        block_square[c] -= lost;
      }
      is_good = !bad || is_second;
    }
    for (std::int64_t c = 0; c < channels; ++c) {
      const double difference = seen == 0 ? block_sum[c] : block_sum[c] - mean[c];
      mean[c] = seen == 0 ? block_sum[c] : mean[c] + difference * part;
      deviations[c] += block_square[c] + (seen == 0 ? 0 : difference * difference * weight);
    }
    seen += taken;
  }
}

template <typename Element>
void normalise(const void* data, void* out, std::int64_t count, std::int64_t period, const void* means,
               const void* scales, const void* shifts) {
  using Number = Real<Element>;
  const auto* rows = static_cast<const Element*>(data);
  auto* to = static_cast<Element*>(out);
  const auto *mean = static_cast<const Number*>(means), *scale = static_cast<const Number*>(scales),
             *shift = static_cast<const Number*>(shifts);
  for_each<Element>(
      count, period,
      [=]<int rows_taken>(std::int64_t at, std::int64_t k) {
        const Vector<Number> m = load(mean + k), a = load(scale + k), b = load(shift + k);
        for (int row = 0; row < rows_taken; ++row) {
          store(to + at + row * period, (load(rows + at + row * period) - m) * a + b);
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
  const std::int64_t period = period_of<Element>(channels), block = block_rows<Element>(channels, period);
  auto* folded = static_cast<double*>(scratch);
  auto* sums = reinterpret_cast<Number*>(folded + channels);
  Number* products = sums + period;
  for (std::int64_t begin = 0; begin < count; begin += block) {
    const std::int64_t taken = begin + block < count ? block : count - begin;
    const Element *g = grad + begin * channels, *x = rows + begin * channels;
    for (std::int64_t k = 0; k < period; ++k) sums[k] = products[k] = 0;
    for_each<Element>(
        taken * channels, period,
        [=]<int rows_taken>(std::int64_t at, std::int64_t k) {
          const Vector<Number> m = load(mean + k);
          Vector<Number> s = load(sums + k), p = load(products + k);
          for (int row = 0; row < rows_taken; ++row) {
            const Vector<Number> value = load(g + at + row * period);
            s += value;
            p += value * (load(x + at + row * period) - m);
          }
          store(sums + k, s);
          store(products + k, p);
        },
        [=](std::int64_t at, std::int64_t k) {
          const Number value = load_one(g + at);
          sums[k] += value;
          products[k] += value * (load_one(x + at) - mean[k]);
        });
    fold(sums, period, channels, folded);
    for (std::int64_t c = 0; c < channels; ++c) sum[c] += folded[c];
    fold(products, period, channels, folded);
    for (std::int64_t c = 0; c < channels; ++c) product[c] += folded[c];
  }
}

template <typename Element>
void backward(const void* gradient, const void* data, void* out, std::int64_t count, std::int64_t period,
              const void* means, const void* of_grads, const void* of_rows, const void* shifts) {
  using Number = Real<Element>;
  const auto* grad = static_cast<const Element*>(gradient);
  const auto* rows = static_cast<const Element*>(data);
  auto* to = static_cast<Element*>(out);
  const auto *mean = static_cast<const Number*>(means), *by_grad = static_cast<const Number*>(of_grads),
             *by_row = static_cast<const Number*>(of_rows), *shift = static_cast<const Number*>(shifts);
  for_each<Element>(
      count, period,
      [=]<int rows_taken>(std::int64_t at, std::int64_t k) {
        const Vector<Number> m = load(mean + k), a = load(by_grad + k), p = load(by_row + k), b = load(shift + k);
        for (int row = 0; row < rows_taken; ++row) {
          const std::int64_t i = at + row * period;
          store(to + i, load(grad + i) * a + ((load(rows + i) - m) * p + b));
        }
      },
      [=](std::int64_t at, std::int64_t k) {
        store_one(to + at,
                  load_one(grad + at) * by_grad[k] + ((load_one(rows + at) - mean[k]) * by_row[k] + shift[k]));
      });
}

template <typename Element>
constexpr cpu::NormKernels make_norm_kernels() {
  return {period_of<Element>, moments<Element>, normalise<Element>, backward_sums<Element>, backward<Element>};
}

constexpr cpu::NormKernelsByType make_all_norm_kernels() {
  return {make_norm_kernels<double>(), make_norm_kernels<float>(), make_norm_kernels<Half>(),
          make_norm_kernels<BFloat16>()};
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
