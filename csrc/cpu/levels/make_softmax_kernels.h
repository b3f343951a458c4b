// Makes the table of softmax kernels of one level. The including file chooses the instruction set first.
#pragma once

#include <cstdint>

#include "cpu/levels/vectors.h"
#include "cpu/softmax_kernels.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {
namespace softmax {

using Index = std::int64_t;

// Some rows side by side, one in each lane of a register of `width` bytes.
template <int width>
struct Lanes {
  typedef float Floats __attribute__((vector_size(width)));
  typedef std::int32_t Bits __attribute__((vector_size(width)));
  static constexpr Index count = width / static_cast<int>(sizeof(float));

  static NHWC_ALWAYS_INLINE Floats all(float value) { return Floats{} + value; }
  static NHWC_ALWAYS_INLINE Floats load(const float* from) {
    Floats values;
    std::memcpy(&values, from, sizeof(values));
    return values;
  }
  static NHWC_ALWAYS_INLINE void store(float* to, Floats values) { std::memcpy(to, &values, sizeof(values)); }

  // Not by `detail::bits_as`: a template's argument loses the attribute that makes a vector.
  static NHWC_ALWAYS_INLINE Bits as_bits(Floats values) {
    Bits bits;
    std::memcpy(&bits, &values, sizeof(bits));
    return bits;
  }
  static NHWC_ALWAYS_INLINE Floats as_floats(Bits bits) {
    Floats values;
    std::memcpy(&values, &bits, sizeof(values));
    return values;
  }

  // Within 1 unit in the last place; infinities and not-a-number as they should be.
  static NHWC_ALWAYS_INLINE Floats exp(Floats x) {
    // Beyond these the result is 0 or infinite. A comparison with not-a-number is false, which keeps it.
    x = x < all(-105.0f) ? all(-105.0f) : x;
    x = x > all(90.0f) ? all(90.0f) : x;
    // x = n * log(2) + r with a whole n: adding 1.5 * 2^23 rounds, and leaves n in the lowest bits.
    const Floats rounder = all(12582912.0f);
    const Floats shifted = x * 1.44269504f + rounder, n = shifted - rounder;
    const Floats r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    // 2^n in two steps, each of which is a normal number, so that the result may be subnormal.
    const Bits power = as_bits(shifted) - as_bits(rounder), half = power >> 1;
    return p * as_floats((half + 127) << 23) * as_floats((power - half + 127) << 23);
  }

  // Of numbers from 1 on, within 1 unit in the last place. Not-a-number stays what it is.
  static NHWC_ALWAYS_INLINE Floats log(Floats x) {
    // x = 2^n * (1 + f), with 1 + f between the square roots of 1/2 and 2.
    const Bits bits = as_bits(x), n = (bits - 0x3F3504F3) >> 23;
    const Floats f = as_floats(bits - (n << 23)) - 1.0f;
    const Floats rounder = all(12582912.0f), power = as_floats(as_bits(rounder) + n) - rounder;
    Floats p = f * 7.0376836292e-2f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    const Floats square = f * f;
    const Floats small = p * f * square + power * -2.12194440e-4f - square * 0.5f;
    return x == x ? f + small + power * 0.693359375f : x;
  }

  template <bool logarithm>
  static NHWC_ALWAYS_INLINE void forward(float* values, Index channels, Index stride) {
    Floats most = load(values);
    for (Index c = 1; c < channels; ++c) {
      const Floats x = load(values + c * stride);
      most = x > most ? x : most;
    }
    Floats sum = all(0.0f);
    for (Index c = 0; c < channels; ++c) {
      const Floats power = exp(load(values + c * stride) - most);
      if (!logarithm) store(values + c * stride, power);
      sum += power;
    }
    const Floats last = logarithm ? log(sum) : 1.0f / sum;
    for (Index c = 0; c < channels; ++c) {
      const Floats x = load(values + c * stride);
      store(values + c * stride, logarithm ? x - most - last : x * last);
    }
  }

  static NHWC_ALWAYS_INLINE float largest(Floats values) {
    float each[count];
    store(each, values);
    float most = each[0];
    for (Index lane = 1; lane < count; ++lane) most = each[lane] > most ? each[lane] : most;
    return most;
  }

  static NHWC_ALWAYS_INLINE float sum(Floats values) {
    float each[count];
    store(each, values);
    if constexpr (count == 4) {
      return (each[0] + each[2]) + (each[1] + each[3]);
    } else {
      using Narrow = Lanes<width / 2>;
      return Narrow::sum(Narrow::load(each) + Narrow::load(each + Narrow::count));
    }
  }
};

using Wide = Lanes<NHWC_REGISTER_BYTES>;

template <bool logarithm>
void forward(float* values, Index channels, Index rows) {
  Index row = 0;
  for (; row + Wide::count <= rows; row += Wide::count) Wide::template forward<logarithm>(values + row, channels, rows);
  for (; row < rows; ++row) Lanes<sizeof(float)>::forward<logarithm>(values + row, channels, rows);
}

// The pairs of registers of a row that fills one or more. The last pair reaches back to elements that were taken
// already, which do not count in sums.
template <typename Element>
class Steps {
 public:
  static constexpr Index size = pair_size<Element>;

  NHWC_ALWAYS_INLINE explicit Steps(Index channels) : whole_(channels / size * size), last_(channels - size) {
    std::int32_t counts[size];
    for (Index k = 0; k < size; ++k) counts[slot_of<Element>(k)] = last_ + k >= whole_ ? -1 : 0;
    std::memcpy(&first_, counts, sizeof(first_));
    std::memcpy(&second_, counts + Wide::count, sizeof(second_));
  }

  // Where the pair begins that is to begin with this element.
  NHWC_ALWAYS_INLINE Index at(Index channel) const { return channel < whole_ ? channel : last_; }

  NHWC_ALWAYS_INLINE Pair<float> counted(Index channel, const Pair<float>& values) const {
    if (channel < whole_) return values;
    return {Wide::as_floats(Wide::as_bits(values.first) & first_),
            Wide::as_floats(Wide::as_bits(values.second) & second_)};
  }

 private:
  Index whole_, last_;
  Wide::Bits first_, second_;
};

constexpr Index longest_row = 512;

// One row after the other, each of which fills registers.
template <typename Element, bool logarithm>
void forward_long(const void* inputs, void* outputs, Index channels, Index rows) {
  const Steps<Element> steps(channels);
  const auto* from = static_cast<const Element*>(inputs);
  auto* to = static_cast<Element*>(outputs);
  alignas(64) float powers[longest_row + Steps<Element>::size];
  for (Index row = 0; row < rows; ++row, from += channels, to += channels) {
    Pair<float> largest = load_pair(from);
    for (Index c = 0; c < channels; c += steps.size) {
      const Pair<float> x = load_pair(from + steps.at(c));
      largest.first = x.first > largest.first ? x.first : largest.first;
      largest.second = x.second > largest.second ? x.second : largest.second;
    }
    const Wide::Floats most = Wide::all(Wide::largest(largest.first > largest.second ? largest.first : largest.second));
    Pair<float> sums{};
    for (Index c = 0; c < channels; c += steps.size) {
      const Pair<float> x = load_pair(from + steps.at(c));
      const Pair<float> power{Wide::exp(x.first - most), Wide::exp(x.second - most)};
      if (!logarithm) store_pair(powers + c, power);
      const Pair<float> term = steps.counted(c, power);
      sums.first += term.first;
      sums.second += term.second;
    }
    const Wide::Floats sum = Wide::all(Wide::sum(sums.first + sums.second));
    const Wide::Floats last = logarithm ? Wide::log(sum) : 1.0f / sum;
    for (Index c = 0; c < channels; c += steps.size) {
      const Pair<float> x = logarithm ? load_pair(from + steps.at(c)) : load_pair(powers + c);
      store_pair(to + steps.at(c), logarithm ? Pair<float>{x.first - most - last, x.second - most - last}
                                             : Pair<float>{x.first * last, x.second * last});
    }
  }
}

template <bool logarithm>
NHWC_ALWAYS_INLINE Wide::Floats term(Wide::Floats gradient, Wide::Floats output) {
  return logarithm ? gradient : gradient * output;
}

template <bool logarithm>
NHWC_ALWAYS_INLINE Wide::Floats result(Wide::Floats gradient, Wide::Floats output, Wide::Floats sum) {
  return logarithm ? gradient - Wide::exp(output) * sum : (gradient - sum) * output;
}

template <typename Element, bool logarithm>
void backward_long(const Element* gradients, const Element* outputs, Element* to, Index channels, Index rows) {
  const Steps<Element> steps(channels);
  for (Index row = 0; row < rows; ++row, gradients += channels, outputs += channels, to += channels) {
    Pair<float> sums{};
    for (Index c = 0; c < channels; c += steps.size) {
      const Pair<float> gradient = load_pair(gradients + steps.at(c)), output = load_pair(outputs + steps.at(c));
      const Pair<float> terms = steps.counted(
          c, {term<logarithm>(gradient.first, output.first), term<logarithm>(gradient.second, output.second)});
      sums.first += terms.first;
      sums.second += terms.second;
    }
    const Wide::Floats sum = Wide::all(Wide::sum(sums.first + sums.second));
    for (Index c = 0; c < channels; c += steps.size) {
      const Pair<float> gradient = load_pair(gradients + steps.at(c)), output = load_pair(outputs + steps.at(c));
      store_pair(to + steps.at(c), Pair<float>{result<logarithm>(gradient.first, output.first, sum),
                                               result<logarithm>(gradient.second, output.second, sum)});
    }
  }
}

// The value of the lane whose number differs in one bit.
template <int bit>
NHWC_ALWAYS_INLINE Wide::Floats swapped(Wide::Floats values) {
  Wide::Floats result;
  for (int lane = 0; lane < Wide::count; ++lane) result[lane] = values[lane ^ bit];
  return result;
}

// Adds up runs of `count` lanes, each of which gets the sum.
template <Index count, int bit = 1>
NHWC_ALWAYS_INLINE Wide::Floats sums_of_runs(Wide::Floats values) {
  if constexpr (bit < count) {
    return sums_of_runs<count, 2 * bit>(values + swapped<bit>(values));
  } else {
    return values;
  }
}

// Rows of a power of two, several of which fill registers.
template <typename Element, bool logarithm, Index channels>
void backward_even(const Element* gradients, const Element* outputs, Element* to, Index count) {
  constexpr bool is_by_parity = slot_of<Element>(1) != 1;  // a row's elements are in both registers
  for (Index k = 0; k < count; k += pair_size<Element>) {
    const Pair<float> gradient = load_pair(gradients + k), output = load_pair(outputs + k);
    Wide::Floats first = term<logarithm>(gradient.first, output.first);
    Wide::Floats second = term<logarithm>(gradient.second, output.second);
    first = sums_of_runs<is_by_parity ? channels / 2 : channels>(is_by_parity ? first + second : first);
    second = is_by_parity ? first : sums_of_runs<channels>(second);
    store_pair(to + k, Pair<float>{result<logarithm>(gradient.first, output.first, first),
                                   result<logarithm>(gradient.second, output.second, second)});
  }
}

// Any short rows, in a block: their terms, the sum of each row in the places of its elements, then the results.
template <typename Element, bool logarithm>
void backward_odd(const Element* gradients, const Element* outputs, Element* to, Index channels, Index rows) {
  constexpr Index most = 1024, lanes = Wide::count;
  alignas(64) float gradient[most], output[most], sums[most];
  const Index block = (most - lanes) / channels;
  for (Index row = 0; row < rows; row += block) {
    const Index taken = row + block < rows ? block : rows - row, count = taken * channels;
    for (Index k = 0; k < count; ++k) gradient[k] = load_one(gradients + row * channels + k);
    for (Index k = 0; k < count; ++k) output[k] = load_one(outputs + row * channels + k);
    for (Index k = 0; k < count; ++k) sums[k] = logarithm ? gradient[k] : gradient[k] * output[k];
    for (float* of_row = sums; of_row < sums + count; of_row += channels) {
      float sum = 0;
      for (Index c = 0; c < channels; ++c) sum += of_row[c];
      for (Index c = 0; c < channels; ++c) of_row[c] = sum;
    }
    for (Index k = 0; k < count; k += lanes) {
      Wide::store(sums + k, result<logarithm>(Wide::load(gradient + k), Wide::load(output + k), Wide::load(sums + k)));
    }
    for (Index k = 0; k < count; ++k) store_one(to + row * channels + k, sums[k]);
  }
}

template <typename Element, bool logarithm>
void backward_short(const Element* gradients, const Element* outputs, Element* to, Index channels, Index rows) {
  Index whole = 0;  // of the elements, by full registers
  const auto even = [&]<Index power>() {
    if (power != channels || power >= pair_size<Element>) return;
    whole = rows * channels / pair_size<Element> * pair_size<Element>;
    backward_even<Element, logarithm, power>(gradients, outputs, to, whole);
  };
  even.template operator()<2>();
  even.template operator()<4>();
  even.template operator()<8>();
  even.template operator()<16>();
  backward_odd<Element, logarithm>(gradients + whole, outputs + whole, to + whole, channels, rows - whole / channels);
}

template <typename Element, bool logarithm>
void backward(const void* gradients, const void* outputs, void* to, Index channels, Index rows) {
  const auto kernel =
      channels < pair_size<Element> ? backward_short<Element, logarithm> : backward_long<Element, logarithm>;
  kernel(static_cast<const Element*>(gradients), static_cast<const Element*>(outputs), static_cast<Element*>(to),
         channels, rows);
}

template <bool logarithm>
constexpr cpu::SoftmaxKernels::ByLogarithm make_kernels() {
  return {forward<logarithm>,
          {forward_long<float, logarithm>, forward_long<Half, logarithm>, forward_long<BFloat16, logarithm>},
          {backward<float, logarithm>, backward<Half, logarithm>, backward<BFloat16, logarithm>}};
}

constexpr cpu::SoftmaxKernels make_kernels() { return {make_kernels<false>(), make_kernels<true>(), longest_row}; }

}  // namespace softmax
}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
