// The passes of group norm for one instruction set.
//
// Rows are processed by the strip: one row, or as many neighbouring ones as fill some pairs of registers. The last pair
// of a strip overlaps the one before it, so that a loop over a strip has no remainder for any number of channels.
// Parameters are repeated for each row of a strip.
#pragma once

#include "cpu/isa/norm_of_few_rows.h"
#include "cpu/isa/vectors.h"
#include "cpu/norm_kernels.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

constexpr int most_strips_at_once = 8;  // which share one load of parameters and sums

constexpr std::int64_t smaller_of(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
constexpr std::int64_t larger_of(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

/// `rows` neighbouring rows, of `width` elements. Parameters and sums of these are in the order of pairs: each pair
/// has places of its own, also the one that overlaps another.
template <typename Element>
struct Strip {
  using Number = Real<Element>;
  static constexpr std::int64_t lanes = pair_size<Element>;
  std::int64_t channels, rows, width;

  /// The fewest rows that fill pairs, or as many as make the overlap negligible: fewer where there are few.
  Strip(std::int64_t count, std::int64_t channels) : channels(channels) {
    std::int64_t divisor = lanes;
    while (channels % divisor != 0) divisor /= 2;  // it is a power of two
    const std::int64_t wanted = larger_of(2 * lanes, smaller_of(32 * lanes, count * channels / most_strips_at_once));
    rows = smaller_of(count, smaller_of(lanes / divisor, (wanted + channels - 1) / channels));
    width = rows * channels;
  }

  std::int64_t filled() const { return width / lanes * lanes; }
  std::int64_t padded() const { return (width + lanes - 1) / lanes * lanes; }

  /// Returns the first element of the last pair.
  std::int64_t last() const { return larger_of(width - lanes, 0); }

  /// Returns where the parameters and sums of an element are.
  std::int64_t slot_of(std::int64_t k) const {
    const std::int64_t slot = k / lanes * lanes;
    return slot + place_in_pair<Element>(k - smaller_of(slot, last()));
  }

  /// Repeats parameters of the channels for all rows, and puts them into the order of pairs.
  void arrange(Number* parameters) const {
    for (std::int64_t k = channels; k < width; ++k) parameters[k] = parameters[k - channels];
    Number values[lanes];
    std::memcpy(values, parameters + last(), sizeof(values));
    std::memcpy(parameters + padded() - lanes, values, sizeof(values));
    if constexpr (is_pair_in_order<Element>) return;
    for (std::int64_t slot = 0; slot < padded(); slot += lanes) {
      std::memcpy(values, parameters + slot, sizeof(values));
      for (int k = 0; k < lanes; ++k) parameters[slot + place_in_pair<Element>(k)] = values[k];
    }
  }

  /// Puts sums into the order of the elements.
  void restore(Number* sums) const {
    Number values[lanes];
    for (std::int64_t slot = 0; !is_pair_in_order<Element> && slot < padded(); slot += lanes) {
      std::memcpy(values, sums + slot, sizeof(values));
      for (int k = 0; k < lanes; ++k) sums[slot + k] = values[place_in_pair<Element>(k)];
    }
    const std::int64_t moved = padded() - lanes - last();
    for (std::int64_t k = filled(); k < width; ++k) sums[k] = sums[k + moved];
  }

  /// Writes a number of each group to all of its channels.
  void fill(Number* parameters, const double* of_groups, std::int64_t groups) const {
    if (groups == channels) {
      for (std::int64_t c = 0; c < channels; ++c) parameters[c] = static_cast<Number>(of_groups[c]);
    } else {
      for (std::int64_t g = 0, k = 0; g < groups; ++g) {
        const auto value = static_cast<Number>(of_groups[g]);
        for (const std::int64_t end = k + channels / groups; k < end; ++k) parameters[k] = value;
      }
    }
  }
};

/// Calls `work(at)` for the same place in each of some strips. The loop is unrolled where that gains something: not
/// where an exponential is most of the time, whose code takes minutes to compile.
template <int strips, cpu::ActivationKind kind = cpu::ActivationKind::none, typename Work>
NHWC_ALWAYS_INLINE void in_each_strip(std::int64_t at, std::int64_t step, const Work& work) {
  if constexpr (has_exponential(kind)) {
#pragma GCC unroll 1
    for (int strip = 0; strip < strips; ++strip) work(at + strip * step);
  } else {
#pragma GCC unroll 8
    for (int strip = 0; strip < strips; ++strip) work(at + strip * step);
  }
}

/// Calls `work<strips>(at, slot)` for a pair of registers in each of some strips: the first one begins with element
/// `at`, and its parameters and sums with `slot`. Before each group of strips, `touch(at, count)` is called. Returns
/// the rows done.
template <int at_once, typename Element, typename Work, typename Touch>
NHWC_ALWAYS_INLINE std::int64_t for_each_strip(const Strip<Element>& strip, std::int64_t row, std::int64_t count,
                                               const Work& work, const Touch& touch) {
  constexpr std::int64_t lanes = Strip<Element>::lanes;
  const std::int64_t last = strip.last(), padded = strip.padded();
  if (strip.width < lanes) return row;
  for (; row + at_once * strip.rows <= count; row += at_once * strip.rows) {
    const std::int64_t first = row * strip.channels;
    touch(first, at_once * strip.width);
    for (std::int64_t slot = 0; slot < padded; slot += lanes) {
      work.template operator()<at_once>(first + smaller_of(slot, last), slot);
    }
  }
  if constexpr (at_once > 1) return for_each_strip<(at_once > 2 ? 2 : 1)>(strip, row, count, work, touch);
  return row;
}

/// Calls the same for all strips, and for the elements of the last, incomplete one `work<1>` or `single(at, slot)`.
template <int at_once, typename Element, typename Work, typename Single, typename Touch>
NHWC_ALWAYS_INLINE void for_each(const Strip<Element>& strip, std::int64_t count, const Work& work,
                                 const Single& single, const Touch& touch) {
  constexpr std::int64_t lanes = Strip<Element>::lanes;
  const std::int64_t first = for_each_strip<at_once>(strip, 0, count, work, touch) * strip.channels,
                     rest = count * strip.channels - first;
  std::int64_t k = 0;
  for (; k + lanes <= smaller_of(rest, strip.filled()); k += lanes) work.template operator()<1>(first + k, k);
  for (; k < rest; ++k) single(first + k, strip.slot_of(k));
}

/// Calls the same in a pass that writes rows, row after row: memory is then twice as fast.
template <typename Element, typename Work, typename Single>
NHWC_ALWAYS_INLINE void for_each_written(const Strip<Element>& strip, std::int64_t count, const Work& work,
                                         const Single& single) {
  const auto nothing = [](std::int64_t, std::int64_t) {};
  if (strip.width == strip.lanes) {
    for_each<most_strips_at_once>(strip, count, work, single, nothing);
  } else {
    for_each<1>(strip, count, work, single, nothing);
  }
}

/// Calls the same in a pass that adds up rows. Several at once share the access to their sums. Short ones that are not
/// close together are first read in order, for the sake of memory; in long ones the CPU sees the order by itself.
template <typename Element, typename Work, typename Single, typename Touch>
NHWC_ALWAYS_INLINE void for_each_summed(const Strip<Element>& strip, std::int64_t count, const Work& work,
                                        const Single& single, const Touch& touch) {
  const auto bytes = most_strips_at_once * strip.width * static_cast<std::int64_t>(sizeof(Element));
  for_each<most_strips_at_once>(strip, count, work, single, [&](std::int64_t at, std::int64_t elements) {
    if (bytes > 1024 && bytes <= 16384) touch(at, elements);
  });
}

/// Reads one byte of each cache line.
template <typename Element>
NHWC_ALWAYS_INLINE void touch_lines(const Element* first, std::int64_t count) {
  constexpr int line = 64;
  const auto* byte = reinterpret_cast<const volatile char*>(first);
  for (const auto* end = reinterpret_cast<const volatile char*>(first + count); byte < end; byte += line) (void)*byte;
}

/// Returns the rows of a block: enough that the work per block is negligible.
template <typename Element>
std::int64_t block_rows(const Strip<Element>& strip) {
  const std::int64_t multiple = most_strips_at_once * strip.rows, wanted = larger_of(256, 32768 / strip.channels);
  return wanted / multiple * multiple + multiple;
}

/// Adds numbers by Dekker's summation, which keeps what rounding lost: one number may be far larger than all others.
template <typename Number>
NHWC_ALWAYS_INLINE void add(Number* sum, Number* lost, Vector<Number> value) {
  const Vector<Number> before = load_vector(sum), after = before + value;
  store_vector(sum, after);
  store_vector(lost, load_vector(lost) + (value - (after - before)));
}
template <typename Number>
NHWC_ALWAYS_INLINE void add(Number* sum, Number* lost, const Pair<Number>& value) {
  constexpr int lanes = VectorOf<Number>::lanes;
  add(sum, lost, value.first);
  add(sum + lanes, lost + lanes, value.second);
}

/// Adds what was lost. If a sum is infinite, that is infinite or not-a-number, and the sum stays.
template <typename Number>
void make_up(Number* sums, const Number* lost, std::int64_t count) {
  for (std::int64_t k = 0; k < count; ++k) sums[k] += lost[k] - lost[k] == 0 ? lost[k] : 0;
}

/// Sets the sums of a strip, and what they lost, to zero.
template <typename Number>
void clear(Number* sums, Number* lost, std::int64_t count) {
  for (std::int64_t k = 0; k < count; ++k) sums[k] = lost[k] = 0;
}

/// Adds up the deviations from `shift`, and their squares.
template <typename Element>
void sum_block(const Strip<Element>& strip, const Element* rows, std::int64_t count, const Real<Element>* shift,
               Real<Element>* sum, Real<Element>* square, Real<Element>* lost, Real<Element>* lost_square) {
  using Number = Real<Element>;
  const std::int64_t padded = strip.padded(), step = strip.width;
  clear(sum, lost, padded);
  clear(square, lost_square, padded);
  for_each_summed(
      strip, count,
      [=]<int strips>(std::int64_t at, std::int64_t slot) {
        const auto origin = load_pair(shift + slot);
        Pair<Number> sums{}, squares{};
        in_each_strip<strips>(at, step, [&](std::int64_t from) {
          const auto value = load_pair(rows + from) - origin;
          sums = sums + value;
          squares = squares + value * value;
        });
        add(sum + slot, lost + slot, sums);
        add(square + slot, lost_square + slot, squares);
      },
      [=](std::int64_t at, std::int64_t slot) {
        const auto value = load_one(rows + at) - shift[slot];
        sum[slot] += value;
        square[slot] += value * value;
      },
      [=](std::int64_t at, std::int64_t elements) { touch_lines(rows + at, elements); });
  make_up(sum, lost, padded);
  make_up(square, lost_square, padded);
  strip.restore(sum);
  strip.restore(square);
}

/// Returns the sum of the deviations from `center`, or of their squares, of part of each row, in doubles.
template <bool squared, typename Element>
double sum_of(const Element* rows, std::int64_t count, std::int64_t step, std::int64_t width, double center) {
  constexpr int lanes = 2 * VectorOf<double>::lanes;
  const auto term = [=](auto value) {
    const auto deviation = value - center;
    if constexpr (squared) return deviation * deviation;
    return deviation;
  };
  Pair<double> sums{};
  double sum = 0;
  for (std::int64_t row = 0; row < count; ++row, rows += step) {
    std::int64_t k = 0;
    for (; k + lanes <= width; k += lanes) {
      const Pair<double> values = load_doubles(rows + k);
      sums.first += term(values.first);
      sums.second += term(values.second);
    }
    for (; k < width; ++k) sum += term(static_cast<double>(load_one(rows + k)));
  }
  return width < lanes ? sum : sum + total_of<double>(sums.first + sums.second);
}

/// Computes the moments of a group in doubles, where deviations are not finite: those from an infinite mean are
/// not-a-number, and floats overflow early. The mean of infinite values of one sign is infinite.
template <typename Element>
void plain_moments(const Element* rows, std::int64_t count, std::int64_t channels, std::int64_t of_group, double* mean,
                   double* deviations) {
  const double average = sum_of<false>(rows, count, channels, of_group, 0) / static_cast<double>(count * of_group);
  *mean = average;
  *deviations = sum_of<true>(rows, count, channels, of_group, average);
}

inline bool is_finite(double value) { return value - value == 0; }

/// Adds the sums of a strip to those of the channels.
template <typename Element>
void fold(const Strip<Element>& strip, const Real<Element>* sums, double* folded) {
  for (std::int64_t k = 0; k < strip.width; k += strip.channels) {
    for (std::int64_t c = 0; c < strip.channels; ++c) folded[c] += static_cast<double>(sums[k + c]);
  }
}

/// Replaces sums of the channels by those of the groups.
inline void add_up_groups(double* sums, std::int64_t groups, std::int64_t of_group) {
  if (of_group == 1) return;
  for (std::int64_t g = 0; g < groups; ++g) sums[g] = sum_of<false>(sums + g * of_group, 1, of_group, of_group, 0);
}

/// Computes moments by provisional means. Within a block, deviations from a guess of each group's mean and their
/// squares are added up. The guess is the mean so far, at first that of a few rows. If it was so bad that squares would
/// cancel, the block is added up again around its own mean. Blocks are merged by the rule of Chan,
/// Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
template <typename Element>
void moments_of_blocks(const NormRows& shape, const Element* rows, double* mean, double* deviations, double* scratch) {
  using Number = Real<Element>;
  const auto [count, channels, groups] = shape;
  const std::int64_t of_group = channels / groups;
  const Strip<Element> strip(count, channels);
  const std::int64_t block = block_rows(strip), padded = strip.padded();
  auto* shift = reinterpret_cast<Number*>(scratch);
  Number *sum = shift + padded, *square = sum + padded, *lost = square + padded, *lost_square = lost + padded;
  auto* block_mean = reinterpret_cast<double*>(lost_square + padded);
  double *block_deviations = block_mean + channels, *origin = block_deviations + channels;
  for (std::int64_t seen = 0; seen < count; seen += block) {
    const std::int64_t taken = smaller_of(block, count - seen);
    const Element* first = rows + seen * channels;
    const double here = static_cast<double>(taken * of_group), before = static_cast<double>(seen * of_group),
                 of_here = 1 / here, part = here / (here + before);
    if (seen == 0) {
      const std::int64_t few = smaller_of(taken, larger_of(4, 16 / of_group)), step = taken / few * channels;
      for (std::int64_t c = 0; c < channels; ++c) block_mean[c] = 0;
      for (const Element* row = first; row < first + few * step; row += step) {
        for (std::int64_t c = 0; c < channels; ++c) block_mean[c] += static_cast<double>(load_one(row + c));
      }
      add_up_groups(block_mean, groups, of_group);
      const double share = 1 / static_cast<double>(few * of_group);
      for (std::int64_t g = 0; g < groups; ++g) mean[g] = block_mean[g] * share, deviations[g] = 0;
    }
    for (bool is_good = false, is_second = false; !is_good; is_second = true) {
      const double* guess = is_second ? block_mean : mean;
      for (std::int64_t g = 0; g < groups; ++g) origin[g] = static_cast<double>(static_cast<Number>(guess[g]));
      strip.fill(shift, origin, groups);
      strip.arrange(shift);
      sum_block(strip, first, taken, shift, sum, square, lost, lost_square);
      for (std::int64_t c = 0; c < channels; ++c) block_mean[c] = block_deviations[c] = 0;
      fold(strip, sum, block_mean);
      fold(strip, square, block_deviations);
      add_up_groups(block_mean, groups, of_group);
      add_up_groups(block_deviations, groups, of_group);
      int bad = 0;
      for (std::int64_t g = 0; g < groups; ++g) {
        const double moved = block_mean[g] * of_here, cancelled = block_mean[g] * moved;
        bad |= block_deviations[g] < 2 * cancelled;
        block_mean[g] = origin[g] + moved;
        block_deviations[g] -= cancelled;
      }
      is_good = !bad || is_second;
    }
    for (std::int64_t g = 0; g < groups; ++g) {
      const double difference = seen == 0 ? block_mean[g] : block_mean[g] - mean[g];
      mean[g] = seen == 0 ? block_mean[g] : mean[g] + difference * part;
      deviations[g] += block_deviations[g] + (seen == 0 ? 0 : difference * difference * before * part);
    }
  }
}

/// Sums of deviations and of their squares: of few terms in registers, of all others in doubles.
template <typename Number>
struct Deviations {
  static constexpr std::int64_t lanes = VectorOf<Number>::lanes;
  static constexpr int at_once = 4, most_terms = 8;
  Vector<Number> sums[at_once] = {}, squares[at_once] = {};
  Pair<double> all = {}, all_squares = {};
  int terms = 0;

  NHWC_ALWAYS_INLINE void add(int to, Vector<Number> deviation) {
    sums[to] += deviation;
    squares[to] += deviation * deviation;
  }
  NHWC_ALWAYS_INLINE void flush() {
    all = all + doubles_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
    all_squares = all_squares + doubles_of((squares[0] + squares[1]) + (squares[2] + squares[3]));
    for (int each = 0; each < at_once; ++each) sums[each] = squares[each] = Vector<Number>{};
    terms = 0;
  }
  NHWC_ALWAYS_INLINE void count() {
    if (++terms >= most_terms) flush();
  }

 private:
  static NHWC_ALWAYS_INLINE Pair<double> doubles_of(Vector<Number> values) {
    if constexpr (std::is_same_v<Number, double>) {
      return {values, Vector<double>{}};
    } else {
      Number stored[lanes];
      store_vector(stored, values);
      return load_doubles(stored);
    }
  }
};

/// Adds up the deviations from `center`, and their squares, of runs of neighbouring elements, each of at least a
/// register. The last register of a run overlaps the one before it.
template <typename Element>
void sum_runs(const Element* first, std::int64_t runs, std::int64_t length, std::int64_t step, Real<Element> center,
              double* sum, double* square) {
  using Number = Real<Element>;
  constexpr std::int64_t lanes = VectorOf<Number>::lanes, at_once = Deviations<Number>::at_once;
  const std::int64_t rest = length % lanes, filled = length - rest;
  Vector<Number> is_fresh{};
  for (std::int64_t lane = lanes - rest; lane < lanes; ++lane) is_fresh[lane] = 1;
  Deviations<Number> found;
  for (std::int64_t run = 0; run < runs; ++run, first += step) {
    std::int64_t k = 0;
    for (; k + at_once * lanes <= filled; k += at_once * lanes) {
      NHWC_UNROLL
      for (int each = 0; each < at_once; ++each) found.add(each, load_vector(first + k + each * lanes) - center);
      found.count();
    }
    for (; k < filled; k += lanes) found.add(0, load_vector(first + k) - center);
    if (rest > 0) found.add(1, (load_vector(first + length - lanes) - center) * is_fresh);
    found.count();
  }
  found.flush();
  *sum = total_of<double>(found.all.first + found.all.second);
  *square = total_of<double>(found.all_squares.first + found.all_squares.second);
}

/// Computes moments group by group, by the deviations from a guess, the mean of a few rows, as `moments_of_blocks`
/// does.
template <typename Element>
void moments_of_runs(const NormRows& shape, const Element* rows, double* mean, double* deviations) {
  using Number = Real<Element>;
  const auto [count, channels, groups] = shape;
  const std::int64_t of_group = channels / groups, few = larger_of(1, smaller_of(4, count / 8));
  const std::int64_t length = groups == 1 ? count * channels : of_group, runs = groups == 1 ? 1 : count;
  const double elements = static_cast<double>(count * of_group);
  for (std::int64_t g = 0; g < groups; ++g) {
    const Element* first = rows + g * of_group;
    double guess = sum_of<false>(first, few, count / few * channels, of_group, 0) / static_cast<double>(few * of_group);
    for (bool is_good = false, is_second = false; !is_good; is_second = true) {
      const auto center = static_cast<Number>(guess);
      double sum, square;
      sum_runs(first, runs, length, channels, center, &sum, &square);
      const double moved = sum / elements, cancelled = sum * moved;
      is_good = is_second || !(square < 2 * cancelled);
      mean[g] = guess = static_cast<double>(center) + moved;
      deviations[g] = square - cancelled;
    }
  }
}

template <typename Element>
void moments(const NormRows& shape, const void* data, double* mean, double* deviations, double* scratch) {
  const auto [count, channels, groups] = shape;
  const auto* rows = static_cast<const Element*>(data);
  // Runs need no sums of channels. Short ones of a large sample are read from the same lines of memory several times.
  const std::int64_t bytes = bytes_of<Element>(shape), shortest = bytes <= 1 << 17   ? 128
                                                                  : bytes <= 1 << 19 ? 512
                                                                                     : 1024;
  if (has_runs_of<Element>(shape, shortest)) {
    moments_of_runs(shape, rows, mean, deviations);
  } else if (has_few_rows<Element>(shape)) {
    moments_of_few_rows(shape, rows, mean, deviations);
  } else {
    moments_of_blocks(shape, rows, mean, deviations, scratch);
  }
  // A mean that is not finite makes the deviations so.
  const std::int64_t of_group = channels / groups;
  for (std::int64_t g = 0; g < groups; ++g) {
    if (is_finite(deviations[g])) continue;
    plain_moments(rows + g * of_group, count, channels, of_group, mean + g, deviations + g);
  }
}

template <typename Activated, typename Number>
NHWC_ALWAYS_INLINE Pair<Number> value_of(const Activated& activation, const Pair<Number>& y,
                                         const Pair<Number>& slope) {
  return {activation.value(y.first, slope.first), activation.value(y.second, slope.second)};
}
template <typename Activated, typename Number>
NHWC_ALWAYS_INLINE Pair<Number> gradient_of(const Activated& activation, const Pair<Number>& grad,
                                            const Pair<Number>& y, const Pair<Number>& slope) {
  return {activation.gradient(grad.first, y.first, slope.first),
          activation.gradient(grad.second, y.second, slope.second)};
}

template <typename Element, cpu::ActivationKind kind>
void normalise(const NormRows& shape, const void* data, const void* others, void* out, const cpu::NormNumbers& numbers,
               double* scratch) {
  using Number = Real<Element>;
  const auto* rows = static_cast<const Element*>(data);
  const auto* residual = static_cast<const Element*>(others);
  auto* to = static_cast<Element*>(out);
  const Strip<Element> strip(shape.count, shape.channels);
  const std::int64_t step = strip.width;
  const Affine<Number, kind> by(shape, numbers, scratch, strip.padded());
  const Activation<Number, kind> activation(numbers.ceiling);
  if (is_written_by_groups<Element>(shape)) {
    return normalise_few_rows(shape, rows, residual, to, numbers.mean, by, activation);
  }
  by.arrange(strip);
  const auto write = [&]<bool has_residual>() {
    for_each_written(
        strip, shape.count,
        [=]<int strips>(std::int64_t at, std::int64_t slot) {
          const auto m = load_pair(by.mean + slot), a = load_pair(by.scale + slot), b = load_pair(by.shift + slot),
                     slope = load_pair(by.slope + slot);
          in_each_strip<strips, kind>(at, step, [&](std::int64_t from) {
            auto y = (load_pair(rows + from) - m) * a + b;
            if constexpr (has_residual) y = y + load_pair(residual + from);
            store_pair(to + from, value_of(activation, y, slope));
          });
        },
        [=](std::int64_t at, std::int64_t slot) {
          Number y = (load_one(rows + at) - by.mean[slot]) * by.scale[slot] + by.shift[slot];
          if constexpr (has_residual) y += load_one(residual + at);
          store_one(to + at, activation.value(y, by.slope[slot]));
        });
  };
  if (residual) {
    write.template operator()<true>();
  } else {
    write.template operator()<false>();
  }
}

template <bool is_written, typename Element, cpu::ActivationKind kind>
void backward_sums_of_blocks(const NormRows& shape, const Element* grad, const Element* rows, Element* before,
                             const Strip<Element>& strip, const Affine<Real<Element>, kind>& by,
                             const Activation<Real<Element>, kind>& activation, double* sum, double* product) {
  using Number = Real<Element>;
  const auto [count, channels, groups] = shape;
  const std::int64_t block = block_rows(strip), padded = strip.padded(), step = strip.width;
  Number *sums = by.end(padded), *products = sums + padded, *lost = products + padded, *lost_product = lost + padded;
  for (std::int64_t begin = 0; begin < count; begin += block) {
    const Element *g = grad + begin * channels, *x = rows + begin * channels;
    Element* to = before + (is_written ? begin * channels : 0);
    clear(sums, lost, padded);
    clear(products, lost_product, padded);
    for_each_summed(
        strip, smaller_of(block, count - begin),
        [=]<int strips>(std::int64_t at, std::int64_t slot) {
          const auto m = load_pair(by.mean + slot), a = load_pair(by.scale + slot), b = load_pair(by.shift + slot),
                     slope = load_pair(by.slope + slot);
          Pair<Number> s{}, p{};
          in_each_strip<strips, kind>(at, step, [&](std::int64_t from) {
            const auto centred = load_pair(x + from) - m;
            const auto value = gradient_of(activation, load_pair(g + from), centred * a + b, slope);
            if constexpr (is_written) store_pair(to + from, value);
            s = s + value;
            p = p + value * centred;
          });
          add(sums + slot, lost + slot, s);
          add(products + slot, lost_product + slot, p);
        },
        [=](std::int64_t at, std::int64_t slot) {
          const Number centred = load_one(x + at) - by.mean[slot],
                       value = activation.gradient(load_one(g + at), centred * by.scale[slot] + by.shift[slot],
                                                   by.slope[slot]);
          if constexpr (is_written) store_one(to + at, value);
          sums[slot] += value;
          products[slot] += value * centred;
        },
        [=](std::int64_t at, std::int64_t elements) {
          touch_lines(g + at, elements);
          touch_lines(x + at, elements);
        });
    make_up(sums, lost, padded);
    make_up(products, lost_product, padded);
    strip.restore(sums);
    strip.restore(products);
    fold(strip, sums, sum);
    fold(strip, products, product);
  }
}

template <typename Element, cpu::ActivationKind kind>
void backward_sums(const NormRows& shape, const void* gradient, const void* data, void* before,
                   const cpu::NormNumbers& numbers, double* sum, double* product, double* scratch) {
  using Number = Real<Element>;
  const auto* grad = static_cast<const Element*>(gradient);
  const auto* rows = static_cast<const Element*>(data);
  auto* to = static_cast<Element*>(before);
  const Strip<Element> strip(shape.count, shape.channels);
  const Affine<Number, kind> by(shape, numbers, scratch, strip.padded(), /*alone=*/1);
  const Activation<Number, kind> activation(numbers.ceiling);
  if (has_few_rows<Element>(shape)) {
    return backward_sums_of_few_rows(shape, grad, rows, to, numbers.mean, by, activation, sum, product);
  }
  by.arrange(strip);
  if constexpr (has_exponential(kind)) {
    if (to) return backward_sums_of_blocks<true>(shape, grad, rows, to, strip, by, activation, sum, product);
  }
  backward_sums_of_blocks<false>(shape, grad, rows, to, strip, by, activation, sum, product);
}

inline double product_of(const double* a, const double* b, std::int64_t count) {
  constexpr int lanes = VectorOf<double>::lanes;
  Vector<double> sums{};
  std::int64_t k = 0;
  for (; k + lanes <= count; k += lanes) sums += load_vector(a + k) * load_vector(b + k);
  double sum = k > 0 ? total_of<double>(sums) : 0;
  for (; k < count; ++k) sum += a[k] * b[k];
  return sum;
}

template <typename Element, cpu::ActivationKind kind>
void backward(const NormRows& shape, const void* gradient, const void* data, void* out, const cpu::NormNumbers& numbers,
              const double* sum, const double* product, std::int64_t sample_rows, double* scratch) {
  using Number = Real<Element>;
  const auto [count, channels, groups] = shape;
  const auto* grad = static_cast<const Element*>(gradient);
  const auto* rows = static_cast<const Element*>(data);
  auto* to = static_cast<Element*>(out);
  const Strip<Element> strip(count, channels);
  const std::int64_t of_group = channels / groups, padded = strip.padded(), step = strip.width;
  const Affine<Number, kind> by(shape, numbers, scratch, padded, /*alone=*/2);
  const Activation<Number, kind> activation(numbers.ceiling);
  if (!sum) {  // the input only tells where the activation is, and takes no other part, whatever is in it
    by.arrange(strip);
    for_each_written(
        strip, count,
        [=]<int strips>(std::int64_t at, std::int64_t slot) {
          const auto m = load_pair(by.mean + slot), a = load_pair(by.scale + slot), b = load_pair(by.shift + slot),
                     slope = load_pair(by.slope + slot);
          in_each_strip<strips, kind>(at, step, [&](std::int64_t from) {
            const auto y = (load_pair(rows + from) - m) * a + b;
            store_pair(to + from, gradient_of(activation, load_pair(grad + from), y, slope) * a);
          });
        },
        [=](std::int64_t at, std::int64_t slot) {
          const Number y = (load_one(rows + at) - by.mean[slot]) * by.scale[slot] + by.shift[slot];
          store_one(to + at, activation.gradient(load_one(grad + at), y, by.slope[slot]) * by.scale[slot]);
        });
    return;
  }
  const double share = 1 / static_cast<double>(of_group * sample_rows);
  const bool is_few = is_written_by_groups<Element>(shape);
  Number* __restrict by_row = by.end(padded), * __restrict by_all = by_row + padded;
  // out = g * scale + (rows - mean) * by_row + by_all
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t first = g * of_group, end = first + of_group;
    const double weighted_sum = product_of(numbers.weight + first, sum + first, of_group),
                 weighted_product = product_of(numbers.weight + first, product + first, of_group);
    const double r = numbers.rstd[g];
    const auto of_row = static_cast<Number>(-r * r * r * weighted_product * share),
               of_all = static_cast<Number>(-r * weighted_sum * share);
    if (is_few) {
      backward_of_few_rows(shape, g, grad, rows, to, by.mean[first], by, of_row, of_all, activation);
      continue;
    }
    for (std::int64_t k = first; k < end; ++k) by_row[k] = of_row, by_all[k] = of_all;
  }
  if (is_few) return;
  by.arrange(strip);
  for (Number* each : {by_row, by_all}) strip.arrange(each);
  for_each_written(
      strip, count,
      [=]<int strips>(std::int64_t at, std::int64_t slot) {
        const auto m = load_pair(by.mean + slot), a = load_pair(by.scale + slot), b = load_pair(by.shift + slot),
                   slope = load_pair(by.slope + slot), p = load_pair(by_row + slot), all = load_pair(by_all + slot);
        in_each_strip<strips, kind>(at, step, [&](std::int64_t from) {
          const auto centred = load_pair(rows + from) - m;
          const auto before = gradient_of(activation, load_pair(grad + from), centred * a + b, slope);
          store_pair(to + from, before * a + (centred * p + all));
        });
      },
      [=](std::int64_t at, std::int64_t slot) {
        const Number centred = load_one(rows + at) - by.mean[slot],
                     before = activation.gradient(load_one(grad + at), centred * by.scale[slot] + by.shift[slot],
                                                  by.slope[slot]);
        store_one(to + at, before * by.scale[slot] + (centred * by_row[slot] + by_all[slot]));
      });
}

/// Up to eight numbers for each element of a strip, and three for each channel.
template <typename Element>
std::int64_t norm_scratch(std::int64_t channels) {
  return 3 * channels + 8 * Strip<Element>(1 << 20, channels).padded();
}

template <typename Element, cpu::ActivationKind kind>
constexpr cpu::NormPasses make_norm_passes() {
  if constexpr (has_exponential(kind) && std::is_same_v<Element, double>)
    return {};
  else
    return {normalise<Element, kind>, backward_sums<Element, kind>, backward<Element, kind>};
}

template <typename Element>
constexpr cpu::NormKernels make_norm_kernels() {
  using Kind = cpu::ActivationKind;
  return {norm_scratch<Element>,
          moments<Element>,
          {make_norm_passes<Element, Kind::none>(), make_norm_passes<Element, Kind::relu>(),
           make_norm_passes<Element, Kind::leaky_relu>(), make_norm_passes<Element, Kind::silu>(),
           make_norm_passes<Element, Kind::gelu>(), make_norm_passes<Element, Kind::gelu_tanh>()}};
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
