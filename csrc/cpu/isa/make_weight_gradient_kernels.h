// The inner loops of a convolution's weight gradient for one instruction set.
#pragma once

#include "cpu/isa/vectors.h"
#include "cpu/weight_gradient_kernels.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

// A tile of sums fills most of the registers: outputs times registers of input numbers.
#if NHWC_X86_LEVEL >= 3 || defined(__ARM_NEON)
constexpr int tile_outputs = 8, tile_registers = 3;  // of 32 registers
#elif NHWC_X86_LEVEL == 2
constexpr int tile_outputs = 4, tile_registers = 3;  // of 16
#else
constexpr int tile_outputs = 4, tile_registers = 2;  // of 16, some of which have the products
#endif

template <typename Element>
void pack_positions(const void* from, const void* end, std::int64_t stride, std::int64_t count, std::int64_t width,
                    void* to, std::int64_t to_stride) {
  constexpr int lanes = VectorOf<Real<Element>>::lanes;
  const auto *source = static_cast<const Element*>(from), *last = static_cast<const Element*>(end);
  auto* numbers = static_cast<Real<Element>*>(to);
  // What a register writes after its position, the next position overwrites.
  const bool has_gaps = to_stride > width;
  for (; !has_gaps && count > 0 && last - source >= width + lanes; --count, source += stride, numbers += width) {
    store_vector(numbers, load_vector(source));
    for (std::int64_t k = lanes; k < width; k += lanes) store_vector(numbers + k, load_vector(source + k));
  }
  for (; count > 0; --count, source += stride, numbers += to_stride) {
    const std::int64_t readable = last - source < width ? last - source : width;
    for (std::int64_t k = 0; k < readable; ++k) numbers[k] = load_one(source + k);
  }
}

/// Adds one tile. Its sums are in registers, and summed apart from those of other blocks, which is more exact.
template <typename Number, int outputs, int registers>
[[gnu::noinline]] void add_tile(const cpu::PackedBlock& block, const Number* grad, const std::int64_t* offsets,
                                Number* sums) {
  constexpr int lanes = VectorOf<Number>::lanes;
  const auto* input = static_cast<const Number*>(block.input);
  const std::int64_t step = block.step, columns = block.columns, stride = block.registers * lanes;
  Vector<Number> tile[outputs][registers] = {};
  for (std::int64_t row = 0; row < block.row_count; ++row) {
    const Number* from = input + block.rows[row];
    for (std::int64_t column = 0; column < columns; ++column, from += step, grad += outputs) {
      Vector<Number> numbers[registers];
      NHWC_UNROLL
      for (int r = 0; r < registers; ++r) numbers[r] = load_vector(from + offsets[r]);
      NHWC_UNROLL
      for (int o = 0; o < outputs; ++o) {
        NHWC_UNROLL
        for (int r = 0; r < registers; ++r) tile[o][r] += grad[o] * numbers[r];
      }
    }
  }
  NHWC_UNROLL
  for (int o = 0; o < outputs; ++o) {
    NHWC_UNROLL
    for (int r = 0; r < registers; ++r) {
      Number* sum = sums + o * stride + r * lanes;
      store_vector(sum, load_vector(sum) + tile[o][r]);
    }
  }
}

/// Returns how many outputs are next, of those that are left.
constexpr int outputs_of_tile(std::int64_t left) { return left > tile_outputs / 2 ? tile_outputs : tile_outputs / 2; }

template <typename Number>
void multiply_block(const cpu::PackedBlock& block, void* out) {
  using AddTile = void (*)(const cpu::PackedBlock&, const Number*, const std::int64_t*, Number*);
  constexpr int most = tile_registers, half = tile_outputs / 2;
  constexpr AddTile full_tiles[] = {add_tile<Number, tile_outputs, 1>, add_tile<Number, tile_outputs, 2>,
                                    add_tile<Number, tile_outputs, most>};
  constexpr AddTile half_tiles[] = {add_tile<Number, half, 1>, add_tile<Number, half, 2>, add_tile<Number, half, most>};
  constexpr int lanes = VectorOf<Number>::lanes;
  const auto* grad = static_cast<const Number*>(block.grad);
  auto* sums = static_cast<Number*>(out);
  std::int64_t width = 0;
  for (std::int64_t r = 0; r < block.registers; r += width) {
    const std::int64_t left = block.registers - r;
    width = left >= 2 * most || left == most ? most : left > most ? (left + 1) / 2 : left;
    for (std::int64_t o = 0; o < block.outputs; o += tile_outputs) {
      const bool is_full = outputs_of_tile(block.outputs - o) == tile_outputs;
      (is_full ? full_tiles : half_tiles)[width - 1](block, grad + o * block.capacity, block.offsets + r,
                                                     sums + (o * block.registers + r) * lanes);
    }
  }
}

template <typename Number, int outputs>
NHWC_ALWAYS_INLINE void sum_outputs(const Number* grad, std::int64_t positions, Number* sums) {
  constexpr int chains = 4;  // of dependent additions
  Number chain[chains][outputs] = {};
  for (; positions >= chains; positions -= chains, grad += chains * outputs) {
    NHWC_UNROLL
    for (int k = 0; k < chains; ++k) {
      NHWC_UNROLL
      for (int o = 0; o < outputs; ++o) chain[k][o] += grad[k * outputs + o];
    }
  }
  for (; positions > 0; --positions, grad += outputs) {
    for (int o = 0; o < outputs; ++o) chain[0][o] += grad[o];
  }
  for (int o = 0; o < outputs; ++o) sums[o] += (chain[0][o] + chain[1][o]) + (chain[2][o] + chain[3][o]);
}

template <typename Number>
void sum_gradient(const cpu::PackedBlock& block, void* out) {
  const auto* grad = static_cast<const Number*>(block.grad);
  auto* sums = static_cast<Number*>(out);
  const std::int64_t positions = block.row_count * block.columns;
  for (std::int64_t o = 0; o < block.outputs; o += tile_outputs) {
    if (outputs_of_tile(block.outputs - o) == tile_outputs) {
      sum_outputs<Number, tile_outputs>(grad + o * block.capacity, positions, sums + o);
    } else {
      sum_outputs<Number, tile_outputs / 2>(grad + o * block.capacity, positions, sums + o);
    }
  }
}

template <typename Element>
void write_sums(const void* sums, std::int64_t sums_stride, std::int64_t rows, std::int64_t count, void* out,
                std::int64_t out_stride) {
  const auto* from = static_cast<const Real<Element>*>(sums);
  auto* __restrict to = static_cast<Element*>(out);
  for (; rows > 0; --rows, from += sums_stride, to += out_stride) {
    for (std::int64_t k = 0; k < count; ++k) store_one(to + k, from[k]);
  }
}

template <typename Element>
constexpr cpu::WeightGradientKernels make_weight_gradient_kernels() {
  using Number = Real<Element>;
  return {VectorOf<Number>::lanes, tile_outputs,         pack_positions<Element>,
          multiply_block<Number>,  sum_gradient<Number>, write_sums<Element>};
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
