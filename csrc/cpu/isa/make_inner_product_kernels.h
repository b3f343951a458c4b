// Inner products for one instruction set: registers have neighbouring terms of the sums, of some rows of the weight and
// some windows at a time, so that neither is packed.
#pragma once

#include "cpu/inner_product_kernels.h"
#include "cpu/isa/make_pointwise_kernels.h"
#include "cpu/isa/vectors.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

// A tile of sums fills most of the registers. Four rows are a register of four results.
constexpr int inner_product_rows = 4;
#if NHWC_X86_LEVEL >= 3 || defined(__ARM_NEON)
constexpr int inner_product_positions = 6;  // of 32 registers
#elif NHWC_X86_LEVEL == 2
constexpr int inner_product_positions = 3;  // of 16
#else
constexpr int inner_product_positions = 2;  // of 16, some of which have the products
#endif

/// Loads the first elements of a register, and zeros.
template <typename Element>
NHWC_ALWAYS_INLINE Vector<float> load_first(const Element* source, std::int64_t count) {
#if NHWC_X86_LEVEL >= 3
  if constexpr (std::is_same_v<Element, float>) {
    const auto mask = static_cast<__mmask16>((1U << count) - 1);
    return reinterpret_cast<Vector<float>>(_mm512_maskz_loadu_ps(mask, source));
  }
#endif
  Element all[VectorOf<float>::lanes] = {};
  for (std::int64_t k = 0; k < count; ++k) all[k] = source[k];
  const Element* first = all;
  return load_vector(first);
}

/// Adds the products of a register of each row and of each window.
template <int positions, typename Load>
NHWC_ALWAYS_INLINE void add_products(Vector<float> (*sums)[inner_product_rows], const Load& load) {
  Vector<float> of_windows[positions];
  NHWC_UNROLL
  for (int p = 0; p < positions; ++p) of_windows[p] = load.of_window(p);
  NHWC_UNROLL
  for (int r = 0; r < inner_product_rows; ++r) {
    const Vector<float> of_row = load.of_row(r);
    NHWC_UNROLL
    for (int p = 0; p < positions; ++p) sums[p][r] += of_row * of_windows[p];
  }
}

template <typename Element, int positions>
struct WholeRegisters {
  const Element* const (&rows)[inner_product_rows];
  const Element* const (&windows)[positions];
  std::int64_t at;

  NHWC_ALWAYS_INLINE Vector<float> of_row(int r) const { return load_vector(rows[r] + at); }
  NHWC_ALWAYS_INLINE Vector<float> of_window(int p) const { return load_vector(windows[p] + at); }
};

template <typename Element, int positions>
struct LastRegisters {
  const Element* const (&rows)[inner_product_rows];
  const Element* const (&windows)[positions];
  std::int64_t at, count;

  NHWC_ALWAYS_INLINE Vector<float> of_row(int r) const { return load_first(rows[r] + at, count); }
  NHWC_ALWAYS_INLINE Vector<float> of_window(int p) const { return load_first(windows[p] + at, count); }
};

/// Computes the products of a tile of so many windows, from one of them on. So many of the next rows are fetched.
template <typename Element, int positions, int fetched_rows>
[[gnu::noinline]] void multiply_windows(const cpu::InnerProducts& products, std::int64_t first, int first_fetched) {
  constexpr int lanes = VectorOf<float>::lanes, all_rows = inner_product_rows;
  const std::int64_t whole = products.length / lanes * lanes;
  Vector<float> sums[positions][all_rows] = {};
  const Element* rows[all_rows];
  for (int r = 0; r < all_rows; ++r) {
    rows[r] = static_cast<const Element*>(products.weight) + (r < products.rows ? r : 0) * products.row_step;
  }
  const Element* fetched = rows[0] + (all_rows + first_fetched) * products.row_step;
  const void* const* runs = products.windows + first;
  for (std::int64_t run = 0; run < products.runs; ++run, runs += products.positions) {
    const Element* windows[positions];
    NHWC_UNROLL
    for (int p = 0; p < positions; ++p) windows[p] = static_cast<const Element*>(runs[p]) + products.offset;
    for (std::int64_t at = 0; at < whole; at += lanes) {
      NHWC_UNROLL
      for (int r = 0; r < fetched_rows; ++r) __builtin_prefetch(fetched + r * products.row_step + at, 0, 2);
      add_products<positions>(sums, WholeRegisters<Element, positions>{rows, windows, at});
    }
    if (whole < products.length) {
      add_products<positions>(sums, LastRegisters<Element, positions>{rows, windows, whole, products.length - whole});
    }
    NHWC_UNROLL
    for (int r = 0; r < all_rows; ++r) rows[r] += products.length;
    fetched += products.length;
  }
  float* others = products.sums + first * all_rows * lanes;
  if (!products.is_first) {
    NHWC_UNROLL
    for (int p = 0; p < positions; ++p) {
      NHWC_UNROLL
      for (int r = 0; r < all_rows; ++r) sums[p][r] += load_vector(others + (p * all_rows + r) * lanes);
    }
  }
  if (!products.is_last) {
    NHWC_UNROLL
    for (int p = 0; p < positions; ++p) {
      NHWC_UNROLL
      for (int r = 0; r < all_rows; ++r) store_vector(others + (p * all_rows + r) * lanes, sums[p][r]);
    }
    return;
  }
  constexpr std::make_integer_sequence<int, lanes> each_lane;
  auto* out = static_cast<Element*>(products.out) + first * products.out_step;
  NHWC_UNROLL
  for (int p = 0; p < positions; ++p, out += products.out_step) {
    const auto four = folded(merged<2>(merged<1>(sums[p][0], sums[p][1], each_lane),
                                       merged<1>(sums[p][2], sums[p][3], each_lane), each_lane),
                             std::make_integer_sequence<int, 4>());
    for (int r = 0; r < products.rows; ++r) store_one(out + r, products.bias ? four[r] + products.bias[r] : four[r]);
  }
}

template <typename Element, int positions, int fetched_rows>
NHWC_ALWAYS_INLINE void multiply_tile(const cpu::InnerProducts& products, std::int64_t count, std::int64_t first,
                                      int first_fetched) {
  if constexpr (positions > 0) {
    if (count == positions) return multiply_windows<Element, positions, fetched_rows>(products, first, first_fetched);
    multiply_tile<Element, positions - 1, fetched_rows>(products, count, first, first_fetched);
  }
}

/// Tiles are of nearly equal sizes. The first two fetch the next rows, or the only one.
template <typename Element>
void multiply_rows_and_windows(const cpu::InnerProducts& products) {
  constexpr int most = inner_product_positions, rows = inner_product_rows;
  const std::int64_t tiles = (products.positions + most - 1) / most;
  for (std::int64_t tile = 0; tile < tiles; ++tile) {
    const std::int64_t first = products.positions * tile / tiles;
    const std::int64_t count = products.positions * (tile + 1) / tiles - first;
    if (products.has_next && tiles == 1) {
      multiply_tile<Element, most, rows>(products, count, first, 0);
    } else if (products.has_next && tile < 2) {
      multiply_tile<Element, most, rows / 2>(products, count, first, static_cast<int>(tile) * rows / 2);
    } else {
      multiply_tile<Element, most, 0>(products, count, first, 0);
    }
  }
}

template <typename Element>
constexpr cpu::InnerProductKernels make_inner_product_kernels() {
  if constexpr (std::is_same_v<Element, double>) {
    return {};
  } else {
    return {.lanes = VectorOf<float>::lanes,
            .rows_at_once = inner_product_rows,
            .multiply = multiply_rows_and_windows<Element>};
  }
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
