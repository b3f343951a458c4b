// The sums of grouped convolutions for one instruction set.
//
// A tile of neighbouring pixels by one or two registers of channels stays in registers while all taps and inputs are
// added. An input number is broadcast to the channels of its group, or is in a register already if that has several
// groups.
#pragma once

#include "cpu/grouped_kernels.h"
#include "cpu/isa/vectors.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

// AVX-512 and NEON have 32 registers, others 16: two or three are for weights and an input.
#if NHWC_X86_LEVEL >= 3 || defined(__ARM_NEON)
constexpr int most_pixels_of_one_register = 14, most_pixels_of_two_registers = 12;
#else
constexpr int most_pixels_of_one_register = 14, most_pixels_of_two_registers = 6;
#endif

template <typename Element, int registers>
void cast_registers(const Element* from, std::int64_t count, std::int64_t step, Real<Element>* to,
                    std::int64_t out_step) {
  constexpr int lanes = VectorOf<Real<Element>>::lanes;
  for (std::int64_t row = 0; row < count; ++row, from += step, to += out_step) {
#pragma GCC unroll 4
    for (int r = 0; r < registers; ++r) store(to + r * lanes, load(from + r * lanes));
  }
}

template <typename Element>
void cast_rows(const void* rows, std::int64_t count, std::int64_t channels, std::int64_t step, void* out,
               std::int64_t out_step) {
  constexpr int lanes = VectorOf<Real<Element>>::lanes;
  const auto* from = static_cast<const Element*>(rows);
  auto* to = static_cast<Real<Element>*>(out);
  if (channels == lanes) return cast_registers<Element, 1>(from, count, step, to, out_step);
  if (channels == 2 * lanes) return cast_registers<Element, 2>(from, count, step, to, out_step);
  for (std::int64_t row = 0; row < count; ++row, from += step, to += out_step) {
    std::int64_t c = 0;
    for (; c + lanes <= channels; c += lanes) store(to + c, load(from + c));
    for (; c < channels; ++c) to[c] = load_one(from + c);
  }
}

#if NHWC_HAS_SHUFFLES
/// Writes, for each of `width` inputs, the register in which all lanes of a group have it.
template <typename Number, int width, int... lane>
NHWC_ALWAYS_INLINE void spread_register(Vector<Number> value, Number* out, std::integer_sequence<int, lane...>) {
  const auto write = [&]<int... input>(std::integer_sequence<int, input...>) {
    const auto write_one = [&]<int c>(std::integral_constant<int, c>) {
      store(out + c * static_cast<int>(sizeof...(lane)),
            __builtin_shufflevector(value, value, (lane / width * width + c)...));
    };
    (write_one(std::integral_constant<int, input>()), ...);
  };
  write(std::make_integer_sequence<int, width>());
}

/// `spread` of groups with as many inputs as outputs that fill a register.
template <typename Element, int width>
void spread_registers(const Element* from, std::int64_t count, std::int64_t step, Real<Element>* to) {
  constexpr int lanes = VectorOf<Real<Element>>::lanes;
  for (std::int64_t pixel = 0; pixel < count; ++pixel, from += step, to += width * lanes) {
    spread_register<Real<Element>, width>(load(from), to, std::make_integer_sequence<int, lanes>());
  }
}
#endif

template <typename Element>
void spread_pixels(const void* pixels, std::int64_t count, std::int64_t groups, std::int64_t inputs,
                   std::int64_t outputs, std::int64_t step, void* out) {
  constexpr int lanes = VectorOf<Real<Element>>::lanes;
  const auto* from = static_cast<const Element*>(pixels);
  auto* to = static_cast<Real<Element>*>(out);
#if NHWC_HAS_SHUFFLES
  if (inputs == outputs && groups * outputs == lanes) {
    if (outputs == 4) return spread_registers<Element, 4>(from, count, step, to);
    if constexpr (lanes == 16) {
      if (outputs == 8) return spread_registers<Element, 8>(from, count, step, to);
    }
  }
#endif
  for (std::int64_t pixel = 0; pixel < count; ++pixel, from += step) {
    for (std::int64_t c = 0; c < inputs; ++c, to += lanes) {
      for (std::int64_t g = 0; g < groups; ++g) {
        const Real<Element> value = load_one(from + g * inputs + c);
        for (std::int64_t o = 0; o < outputs; ++o) to[g * outputs + o] = value;
      }
    }
  }
}

/// The number of inputs is 0 if it is not constant.
template <typename Number, int pixels, int registers, bool is_spread, int constant_inputs>
void sum_tile(const cpu::GroupedRow& row, const Number* source, const Number* weights, const Number* bias, Number* out,
              std::int64_t out_step) {
  constexpr int lanes = VectorOf<Number>::lanes;
  const std::int64_t inputs = constant_inputs != 0 ? constant_inputs : row.inputs;
  const std::int64_t entry = is_spread ? lanes : 1, step = inputs * entry;
  Vector<Number> sums[pixels][registers];
#pragma GCC unroll 14
  for (int p = 0; p < pixels; ++p) {
#pragma GCC unroll 2
    for (int r = 0; r < registers; ++r) sums[p][r] = load(bias + r * lanes);
  }
  for (std::int64_t tap = 0; tap < row.tap_count; ++tap) {
    const Number *x = source + row.taps[tap].pixel, *w = weights + row.taps[tap].weight;
    const auto add_input = [&]() __attribute__((always_inline)) {
      Vector<Number> weight[registers];
#pragma GCC unroll 2
      for (int r = 0; r < registers; ++r) weight[r] = load(w + r * lanes);
#pragma GCC unroll 14
      for (int p = 0; p < pixels; ++p) {
        const Vector<Number> input = is_spread ? load(x + p * step) : broadcast(x[p * step]);
#pragma GCC unroll 2
        for (int r = 0; r < registers; ++r) sums[p][r] += weight[r] * input;
      }
      x += entry, w += row.channels;
    };
    // Loops of a few rounds end in a branch that is predicted badly: four inputs are a round.
    std::int64_t c = 0;
    for (; c + 4 <= inputs; c += 4) add_input(), add_input(), add_input(), add_input();
    for (; c < inputs; ++c) add_input();
  }
#pragma GCC unroll 14
  for (int p = 0; p < pixels; ++p) {
#pragma GCC unroll 2
    for (int r = 0; r < registers; ++r) store(out + p * out_step + r * lanes, sums[p][r]);
  }
}

template <typename Number, int registers, bool is_spread, int constant_inputs, int... less>
NHWC_ALWAYS_INLINE void sum_tile_of(int pixels, std::integer_sequence<int, less...>, const cpu::GroupedRow& row,
                                    const Number* source, const Number* weights, const Number* bias, Number* out,
                                    std::int64_t out_step) {
  using Tile = void (*)(const cpu::GroupedRow&, const Number*, const Number*, const Number*, Number*, std::int64_t);
  static constexpr Tile tiles[] = {sum_tile<Number, less + 1, registers, is_spread, constant_inputs>...};
  tiles[pixels - 1](row, source, weights, bias, out, out_step);
}

/// Sums one or two registers of channels for all pixels, in tiles of nearly equal sizes.
template <typename Number, int registers, bool is_spread, int constant_inputs = 0>
void sum_pixels(const cpu::GroupedRow& row, std::int64_t channel, Number* out, std::int64_t out_step) {
  constexpr int most = registers == 1 ? most_pixels_of_one_register : most_pixels_of_two_registers;
  const auto *source = static_cast<const Number*>(row.source),
             *weights = static_cast<const Number*>(row.weights) + channel,
             *bias = static_cast<const Number*>(row.bias) + channel;
  const std::int64_t step = row.inputs * (is_spread ? VectorOf<Number>::lanes : 1),
                     tiles = (row.pixels + most - 1) / most;
  std::int64_t pixel = 0;
  for (std::int64_t tile = 1; tile <= tiles; ++tile) {
    const std::int64_t end = row.pixels * tile / tiles;
    sum_tile_of<Number, registers, is_spread, constant_inputs>(
        static_cast<int>(end - pixel), std::make_integer_sequence<int, most>(), row, source + pixel * step, weights,
        bias, out + pixel * out_step + channel, out_step);
    pixel = end;
  }
}

template <typename Element>
void sum_grouped_row(const cpu::GroupedRow& row) {
  using Number = Real<Element>;
  constexpr int lanes = VectorOf<Number>::lanes;
  const std::int64_t rounded_up = (row.channels + lanes - 1) / lanes * lanes;
  auto* to = static_cast<Element*>(row.out);
  auto* sums = static_cast<Number*>(row.sums);
  std::int64_t sums_step = rounded_up;
  if constexpr (std::is_same<Element, Number>::value) {
    if (rounded_up == row.channels) sums = to, sums_step = row.out_step;
  }
  const auto by_registers = [&]<int inputs>(std::integral_constant<int, inputs>) {
    if (row.is_spread) return sum_pixels<Number, 1, true, inputs>(row, 0, sums, sums_step);
    std::int64_t c = 0;
    for (; c + lanes < row.channels; c += 2 * lanes) sum_pixels<Number, 2, false, inputs>(row, c, sums, sums_step);
    if (c < row.channels) sum_pixels<Number, 1, false, inputs>(row, c, sums, sums_step);
  };
  // With a constant distance of pixels, their addresses are one register and a constant.
  switch (row.inputs) {
    case 4: by_registers(std::integral_constant<int, 4>()); break;
    case 8: by_registers(std::integral_constant<int, 8>()); break;
    case 16: by_registers(std::integral_constant<int, 16>()); break;
    default: by_registers(std::integral_constant<int, 0>());
  }
  if (static_cast<void*>(sums) == row.out) return;
  for (std::int64_t pixel = 0; pixel < row.pixels; ++pixel, to += row.out_step, sums += sums_step) {
    std::int64_t c = 0;
    for (; c + lanes <= row.channels; c += lanes) store(to + c, load(sums + c));
    for (; c < row.channels; ++c) store_one(to + c, sums[c]);
  }
}

template <typename Element>
constexpr cpu::GroupedKernels make_grouped_kernels() {
  return {VectorOf<Real<Element>>::lanes, sizeof(Real<Element>), cast_rows<Element>, spread_pixels<Element>,
          sum_grouped_row<Element>};
}

constexpr cpu::GroupedKernelsByType make_all_grouped_kernels() {
  return {make_grouped_kernels<double>(), make_grouped_kernels<float>(), make_grouped_kernels<Half>(),
          make_grouped_kernels<BFloat16>()};
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
