// Products of pixels of few channels for one instruction set.
//
// Few outputs of many inputs are sums over registers of inputs: as many registers as they have lanes are reduced at
// once, so that the sums of neighbouring pixels become neighbours. Many outputs of few inputs are registers of outputs.
// Few outputs of few inputs are loops that compilers vectorize over pixels.
#pragma once

#include "cpu/isa/vectors.h"
#include "cpu/pointwise_kernels.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

constexpr int pointwise_lanes = VectorOf<float>::lanes, few = cpu::most_few;
constexpr int tile_pixels = 64, pixels_of_long_tile = 16;  // multiples of the lanes
constexpr int tile_numbers = 4096;                         // at least those of any tile
constexpr int prefetched_bytes = 4096;                     // how far ahead

static_assert(cpu::most_pointwise_channels * pixels_of_long_tile <= tile_numbers);

typedef std::int32_t LaneMask __attribute__((vector_size(NHWC_REGISTER_BYTES)));
using LaneSequence = std::make_integer_sequence<int, pointwise_lanes>;

/// Adds to each lane the one that is `distance` from it: of `a` in the lanes without this bit, of `b` in the others.
template <int distance, int... lanes>
NHWC_ALWAYS_INLINE Vector<float> merged(Vector<float> a, Vector<float> b, std::integer_sequence<int, lanes...>) {
  const LaneMask has_bit = {(lanes & distance ? -1 : 0)...};
  const Vector<float> own = has_bit ? b : a, other = has_bit ? a : b;
  return own + __builtin_shufflevector(other, other, (lanes ^ distance)...);
}

/// Orders sums by their pixels: a lane has the sum of register `lane % segment`, and of pixel `lane / segment` in it.
template <int segment, int... lanes>
NHWC_ALWAYS_INLINE Vector<float> in_order(Vector<float> sums, std::integer_sequence<int, lanes...>) {
  constexpr int pixels = sizeof...(lanes) / segment;
  return __builtin_shufflevector(sums, sums, (lanes % pixels * segment + lanes / pixels)...);
}

/// Filters as registers of weights. The last register ends with the last input, and its mask leaves out what the one
/// before it has.
struct Filters {
  float weights[few * cpu::most_pointwise_channels];
  std::int64_t registers, last;
  Bits mask;
  bool is_masked;
};

/// Returns whether a register has two pixels.
constexpr bool has_two_pixels(std::int64_t inputs) { return inputs > few && 2 * inputs == pointwise_lanes; }

/// Multiplies a register of whole pixels, or all registers of a pixel.
template <int registers, bool is_masked>
NHWC_ALWAYS_INLINE Vector<float> product(const float* x, const Filters& filters, const float* weights) {
  const std::int64_t count = registers > 0 ? registers : filters.registers;
  Vector<float> sum = {};
#pragma GCC unroll 2
  for (std::int64_t r = 0; r + 1 < count; ++r) {
    sum += load(x + r * pointwise_lanes) * load(weights + r * pointwise_lanes);
  }
  Vector<float> last = load(x + (registers == 1 ? 0 : filters.last));
  if (is_masked) last = detail::bits_as<Vector<float>>(detail::bits_as<Bits>(last) & filters.mask);
  return sum + last * load(weights + (count - 1) * pointwise_lanes);
}

/// Sums the products of `2 * distance` registers.
template <int distance, int registers, bool is_masked>
NHWC_ALWAYS_INLINE Vector<float> reduced(const float* x, std::int64_t step, const Filters& filters,
                                         const float* weights) {
  if constexpr (distance == 0) {
    return product<registers, is_masked>(x, filters, weights);
  } else {
    return merged<distance>(reduced<distance / 2, registers, is_masked>(x, step, filters, weights),
                            reduced<distance / 2, registers, is_masked>(x + distance * step, step, filters, weights),
                            LaneSequence());
  }
}

/// Computes `[outputs, tile_pixels]`. A register holds one pixel if `segment` is that of the lanes, or else more.
template <int segment, int registers, bool is_masked>
[[gnu::noinline]] void reduce_tile(const float* x, std::int64_t pixels, std::int64_t inputs, std::int64_t outputs,
                                   const Filters& filters, float* out) {
  const std::int64_t step = pointwise_lanes / segment * inputs;
  for (std::int64_t p = 0; p < pixels; p += pointwise_lanes, x += pointwise_lanes * inputs) {
    const std::int64_t bytes = pointwise_lanes * inputs * static_cast<std::int64_t>(sizeof(float));
    for (std::int64_t byte = 0; byte < bytes; byte += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(x) + prefetched_bytes + byte);
    }
    for (std::int64_t o = 0; o < outputs; ++o) {
      const float* weights = filters.weights + o * filters.registers * pointwise_lanes;
      const Vector<float> sums = reduced<segment / 2, registers, is_masked>(x, step, filters, weights);
      store(out + o * tile_pixels + p, in_order<segment>(sums, LaneSequence()));
    }
  }
}

using ReduceTile = void (*)(const float*, std::int64_t, std::int64_t, std::int64_t, const Filters&, float*);

inline ReduceTile reduce_tile_of(std::int64_t inputs, const Filters& filters) {
  if (has_two_pixels(inputs)) return reduce_tile<pointwise_lanes / 2, 1, false>;
  if (filters.is_masked) {
    return filters.registers == 1 ? reduce_tile<pointwise_lanes, 1, true> : reduce_tile<pointwise_lanes, 0, true>;
  }
  constexpr ReduceTile tiles[] = {reduce_tile<pointwise_lanes, 0, false>, reduce_tile<pointwise_lanes, 1, false>,
                                  reduce_tile<pointwise_lanes, 2, false>};
  return tiles[filters.registers <= 2 ? filters.registers : 0];
}

inline void fill_filters(const float* weights, std::int64_t inputs, std::int64_t outputs, Filters& filters) {
  filters.registers = (inputs + pointwise_lanes - 1) / pointwise_lanes;
  filters.last = inputs < pointwise_lanes ? 0 : inputs - pointwise_lanes;
  filters.is_masked = inputs % pointwise_lanes != 0;
  const std::int64_t first = (filters.registers - 1) * pointwise_lanes - filters.last;  // of the last register's lanes
  for (int lane = 0; lane < pointwise_lanes; ++lane) {
    filters.mask[lane] = lane >= first && filters.last + lane < inputs ? ~0u : 0u;
  }
  const bool repeats = has_two_pixels(inputs);
  float* to = filters.weights;
  for (std::int64_t o = 0; o < outputs; ++o, weights += inputs) {
    for (std::int64_t r = 0; r < filters.registers; ++r) {
      const std::int64_t from = r + 1 < filters.registers ? r * pointwise_lanes : filters.last;
      for (std::int64_t lane = 0; lane < pointwise_lanes; ++lane) {
        const std::int64_t c = repeats ? lane % inputs : from + lane;
        *to++ = c < inputs ? weights[c] : 0;
      }
    }
  }
}

/// Writes `[outputs, tile_pixels]` as pixels, with the bias.
template <int outputs>
[[gnu::noinline]] void interleave(const float* __restrict from, std::int64_t pixels, const float* bias,
                                  float* __restrict to) {
  float biases[outputs];
  for (int o = 0; o < outputs; ++o) biases[o] = bias[o];
  for (std::int64_t p = 0; p < pixels; ++p) {
#pragma GCC unroll 4
    for (int o = 0; o < outputs; ++o) to[p * outputs + o] = from[o * tile_pixels + p] + biases[o];
  }
}

/// Writes pixels as `[channels, tile_pixels]`, with zeros after the last one.
template <int channels>
[[gnu::noinline]] void separate(const float* __restrict from, std::int64_t pixels, float* __restrict to) {
  for (std::int64_t p = 0; p < pixels; ++p) {
#pragma GCC unroll 4
    for (int c = 0; c < channels; ++c) to[c * tile_pixels + p] = from[p * channels + c];
  }
  for (int c = 0; c < channels; ++c) {
    for (std::int64_t p = pixels; p < tile_pixels; ++p) to[c * tile_pixels + p] = 0;
  }
}

template <int inputs, int outputs>
[[gnu::noinline]] void multiply_few(const float* __restrict x, std::int64_t pixels, const float* weights,
                                    const float* bias, float* __restrict out) {
  float w[outputs][inputs], b[outputs];
  for (int o = 0; o < outputs; ++o) {
    b[o] = bias[o];
    for (int c = 0; c < inputs; ++c) w[o][c] = weights[o * inputs + c];
  }
  for (std::int64_t p = 0; p < pixels; ++p) {
#pragma GCC unroll 4
    for (int o = 0; o < outputs; ++o) {
      float sum = b[o];
#pragma GCC unroll 4
      for (int c = 0; c < inputs; ++c) sum += x[p * inputs + c] * w[o][c];
      out[p * outputs + o] = sum;
    }
  }
}

/// Computes many outputs of few inputs. Weights are `[inputs, outputs]` and a register more. What a register writes
/// after its pixel, the next pixel overwrites.
template <int inputs>
[[gnu::noinline]] void spread_inputs(const float* x, std::int64_t pixels, std::int64_t outputs, const float* weights,
                                     const float* bias, float* out) {
  const std::int64_t size = pixels * outputs;
  for (std::int64_t r = 0; r < outputs; r += pointwise_lanes) {
    const std::int64_t first =
        r + pointwise_lanes <= outputs || outputs < pointwise_lanes ? r : outputs - pointwise_lanes;
    Vector<float> w[inputs];
    for (int c = 0; c < inputs; ++c) w[c] = load(weights + c * outputs + first);
    const Vector<float> b = load(bias + first);
    for (std::int64_t p = 0; p < pixels; ++p) {
      Vector<float> sum = b;
#pragma GCC unroll 4
      for (int c = 0; c < inputs; ++c) sum += w[c] * x[p * inputs + c];
      float* to = out + p * outputs + first;
      if (out + size - to >= pointwise_lanes) {
        store(to, sum);
      } else {
        for (std::int64_t lane = 0; to + lane < out + size; ++lane) to[lane] = sum[lane];
      }
    }
  }
}

using Multiply = void (*)(const float*, std::int64_t, const float*, const float*, float*);
using Spread = void (*)(const float*, std::int64_t, std::int64_t, const float*, const float*, float*);
using Separate = void (*)(const float*, std::int64_t, float*);

inline Multiply multiply_few_of(std::int64_t inputs, std::int64_t outputs) {
  constexpr Multiply all[few][few] = {{multiply_few<1, 1>, multiply_few<1, 2>, multiply_few<1, 3>, multiply_few<1, 4>},
                                      {multiply_few<2, 1>, multiply_few<2, 2>, multiply_few<2, 3>, multiply_few<2, 4>},
                                      {multiply_few<3, 1>, multiply_few<3, 2>, multiply_few<3, 3>, multiply_few<3, 4>},
                                      {multiply_few<4, 1>, multiply_few<4, 2>, multiply_few<4, 3>, multiply_few<4, 4>}};
  return all[inputs - 1][outputs - 1];
}

/// Returns elements as floats: these themselves if a register more can be read, or a copy in `room`.
template <typename Element>
NHWC_ALWAYS_INLINE const float* as_floats(const Element* from, std::int64_t count, std::int64_t readable, float* room) {
  if constexpr (std::is_same<Element, float>::value) {
    if (readable >= count + pointwise_lanes) return from;
  }
  std::int64_t k = 0;
  for (; k + pointwise_lanes <= count; k += pointwise_lanes) store(room + k, load(from + k));
  for (; k < count; ++k) room[k] = load_one(from + k);
  return room;
}

/// Returns how many pixels a tile has.
constexpr std::int64_t tile_of(std::int64_t channels) {
  return channels * tile_pixels <= tile_numbers ? tile_pixels : pixels_of_long_tile;
}

template <typename Element>
void multiply_pixels(const void* input, std::int64_t pixels, std::int64_t inputs, std::int64_t outputs,
                     const float* weights, const float* bias, void* output) {
  const auto* x = static_cast<const Element*>(input);
  auto* out = static_cast<Element*>(output);
  const bool are_few = inputs <= few && outputs <= few, is_reduced = inputs > few;
  Filters filters;
  float transposed[few * cpu::most_pointwise_channels + pointwise_lanes];
  float biases[cpu::most_pointwise_channels + pointwise_lanes];
  if (is_reduced) {
    fill_filters(weights, inputs, outputs, filters);
  } else if (!are_few) {
    for (std::int64_t o = 0; o < outputs; ++o) {
      for (std::int64_t c = 0; c < inputs; ++c) transposed[c * outputs + o] = weights[o * inputs + c];
    }
    for (int lane = 0; lane < pointwise_lanes; ++lane) transposed[inputs * outputs + lane] = biases[outputs + lane] = 0;
    std::memcpy(biases, bias, outputs * sizeof(float));
  }
  const ReduceTile reduce = is_reduced ? reduce_tile_of(inputs, filters) : nullptr;
  float x_room[tile_numbers + pointwise_lanes] = {}, out_room[tile_numbers], sums[few * tile_pixels];
  const std::int64_t tile = tile_of(inputs > outputs ? inputs : outputs);
  for (std::int64_t left = pixels, count; left > 0; left -= count, x += count * inputs, out += count * outputs) {
    count = left < tile ? left : tile;
    // Registers are reduced for whole numbers of lanes.
    const std::int64_t readable = count < tile && is_reduced ? 0 : left * inputs;
    const float* from = as_floats(x, count * inputs, readable, x_room);
    float* to = out_room;
    if constexpr (std::is_same<Element, float>::value) to = out;
    if (are_few) {
      multiply_few_of(inputs, outputs)(from, count, weights, bias, to);
    } else if (is_reduced) {
      constexpr void (*interleaves[few])(const float*, std::int64_t, const float*, float*) = {
          interleave<1>, interleave<2>, interleave<3>, interleave<4>};
      reduce(from, count, inputs, outputs, filters, sums);
      interleaves[outputs - 1](sums, count, bias, to);
    } else {
      constexpr Spread spreads[few] = {spread_inputs<1>, spread_inputs<2>, spread_inputs<3>, spread_inputs<4>};
      spreads[inputs - 1](from, count, outputs, transposed, biases, to);
    }
    if constexpr (!std::is_same<Element, float>::value) {
      std::int64_t k = 0;
      for (; k + pointwise_lanes <= count * outputs; k += pointwise_lanes) store(out + k, load(to + k));
      for (; k < count * outputs; ++k) store_one(out + k, to[k]);
    }
  }
}

/// Adds a tile's products of the gradients and of a register of inputs, each register of sums in a few chains.
template <int outputs>
[[gnu::noinline]] void add_products(const float* grad, const float* x, std::int64_t pixels, std::int64_t inputs,
                                    float* sums) {
  constexpr int chains = outputs <= 2 ? 4 : 2;
  Vector<float> chain[chains][outputs] = {};
  for (; pixels >= chains; pixels -= chains, grad += chains * outputs, x += chains * inputs) {
#pragma GCC unroll 4
    for (int k = 0; k < chains; ++k) {
      const Vector<float> numbers = load(x + k * inputs);
#pragma GCC unroll 4
      for (int o = 0; o < outputs; ++o) chain[k][o] += grad[k * outputs + o] * numbers;
    }
  }
  for (; pixels > 0; --pixels, grad += outputs, x += inputs) {
    const Vector<float> numbers = load(x);
    for (int o = 0; o < outputs; ++o) chain[0][o] += grad[o] * numbers;
  }
  for (int o = 0; o < outputs; ++o) {
    Vector<float> sum = chain[0][o] + chain[1][o];
    if (chains == 4) sum += chain[chains - 2][o] + chain[chains - 1][o];
    store(sums + o * pointwise_lanes, load(sums + o * pointwise_lanes) + sum);
  }
}

NHWC_ALWAYS_INLINE float sum_of(const float* numbers) {
  float sum = 0;
  for (int lane = 0; lane < pointwise_lanes; ++lane) sum += numbers[lane];
  return sum;
}

template <typename Element>
void accumulate_pixels(const void* gradient, const void* input, std::int64_t pixels, std::int64_t inputs,
                       std::int64_t outputs, float* weight_sums, float* bias_sums) {
  constexpr Separate separates[few] = {separate<1>, separate<2>, separate<3>, separate<4>};
  const auto* g = static_cast<const Element*>(gradient);
  const auto* x = static_cast<const Element*>(input);
  const bool are_few = inputs <= few;
  const std::int64_t registers = are_few ? 0 : (inputs + pointwise_lanes - 1) / pointwise_lanes;
  const auto first_of = [&](std::int64_t r) {
    const std::int64_t last = inputs < pointwise_lanes ? 0 : inputs - pointwise_lanes;
    return r * pointwise_lanes < last ? r * pointwise_lanes : last;
  };
  float sums[few * (cpu::most_pointwise_channels + pointwise_lanes)] = {}, biases[few * pointwise_lanes] = {};
  float x_room[tile_numbers + pointwise_lanes] = {}, g_room[few * tile_pixels + pointwise_lanes];
  float x_channels[few * tile_pixels], g_channels[few * tile_pixels];
  const std::int64_t tile = tile_of(inputs);
  for (std::int64_t left = pixels, count; left > 0; left -= count, x += count * inputs, g += count * outputs) {
    count = left < tile ? left : tile;
    const float* from = as_floats(x, count * inputs, left * inputs, x_room);
    const float* grads = as_floats(g, count * outputs, left * outputs, g_room);
    separates[outputs - 1](grads, count, g_channels);
    if (are_few) separates[inputs - 1](from, count, x_channels);
    for (std::int64_t o = 0; o < outputs; ++o) {
      Vector<float> bias = load(biases + o * pointwise_lanes);
      for (int p = 0; p < tile_pixels; p += pointwise_lanes) bias += load(g_channels + o * tile_pixels + p);
      store(biases + o * pointwise_lanes, bias);
      for (std::int64_t c = 0; are_few && c < inputs; ++c) {
        float* sum = sums + (o * inputs + c) * pointwise_lanes;
        Vector<float> total = load(sum);
        for (int p = 0; p < tile_pixels; p += pointwise_lanes) {
          total += load(g_channels + o * tile_pixels + p) * load(x_channels + c * tile_pixels + p);
        }
        store(sum, total);
      }
    }
    for (std::int64_t r = 0; r < registers; ++r) {
      constexpr void (*adds[few])(const float*, const float*, std::int64_t, std::int64_t, float*) = {
          add_products<1>, add_products<2>, add_products<3>, add_products<4>};
      adds[outputs - 1](grads, from + first_of(r), count, inputs, sums + r * outputs * pointwise_lanes);
    }
  }
  for (std::int64_t o = 0; o < outputs; ++o) {
    bias_sums[o] += sum_of(biases + o * pointwise_lanes);
    for (std::int64_t c = 0; are_few && c < inputs; ++c) {
      weight_sums[o * inputs + c] += sum_of(sums + (o * inputs + c) * pointwise_lanes);
    }
    for (std::int64_t c = 0; !are_few && c < inputs; ++c) {
      const std::int64_t r = c / pointwise_lanes;
      weight_sums[o * inputs + c] += sums[(r * outputs + o) * pointwise_lanes + c - first_of(r)];
    }
  }
}

template <typename Element>
constexpr cpu::PointwiseKernels make_pointwise_kernels() {
  return {multiply_pixels<Element>, accumulate_pixels<Element>};
}

constexpr cpu::PointwiseKernelsByType make_all_pointwise_kernels() {
  return {make_pointwise_kernels<float>(), make_pointwise_kernels<Half>(), make_pointwise_kernels<BFloat16>()};
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
