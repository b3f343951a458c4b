// The zip network: transposes a tile of a matrix in vector registers, for any vector width, element size and number of
// columns, by shuffles of two registers each.
//
// A tile has as many rows as a register has elements (E, a power of two), and N columns: N full registers, row-major.
// Number its elements by the digits [row | column]. Dealing them out like cards, one to each of p piles in turn, and
// then stacking the piles moves the lowest digit (of radix p) to the top; zipping p equal piles together is the inverse
// and moves the top digit to the bottom:
//
//   row | column  --zip 2-->  rest of row | column | top bit of row  --zip 2--> ... -->  column | row
//
// So log2(E) rounds of zips, of N shuffles each, transpose the tile, primes included. So do rounds of dealing that
// carry the column's digits, the prime factors of N, around the other way; a round of radix p takes p - 1 shuffles for
// a register, which is cheaper for N = 2, 3, 4, 6, 9 and others. The inverse network turns the other way.
//
//   E = 4, N = 3 (r0c0 r0c1 ...):  00 01 02 10 | 11 12 20 21 | 22 30 31 32
//   zip 2:                         00 20 01 21 | 02 22 10 30 | 11 31 12 32
//   zip 2:                         00 10 20 30 | 01 11 21 31 | 02 12 22 32
//
// A round is given by its index map alone; the shuffles are read off it at compile time. Shuffles do not depend on
// the data, so a tile filled with its own indices proves a network: test/cpp/zip_network.cpp proves them all.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "torch_nhwc/cpu/level.h"

#if NHWC_HAS_SHUFFLES

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

/// A vector register of `width` bytes that holds elements of `size` bytes each. Elements of 16 bytes take two lanes.
template <int size, int width>
struct Register {
  using Lane = std::conditional_t<
      size == 1, std::uint8_t,
      std::conditional_t<size == 2, std::uint16_t, std::conditional_t<size == 4, std::uint32_t, std::uint64_t>>>;
  typedef Lane Vector __attribute__((vector_size(width)));
  static constexpr int elements = width / size;
  static constexpr int lanes = width / static_cast<int>(sizeof(Lane));
  static constexpr int lanes_of_element = lanes / elements;
};

enum class Turn { zip, deal };

/// One round on a tile of `columns` registers: element `e` of the result is element `origin(e)` of the tile.
template <typename Register, int columns, Turn turn, int radix>
struct Round {
  using Vector = typename Register::Vector;
  static constexpr int pile = columns * Register::elements / radix;

  static constexpr int origin(int e) {
    return turn == Turn::zip ? e % radix * pile + e / radix : e % pile * radix + e / pile;
  }

  /// Lists the registers that contain the elements of register `v` of the result, in the order of their first use.
  struct Origins {
    int registers[radix + 1] = {};
    int count = 0;
  };
  static constexpr Origins origins(int v) {
    Origins found;
    for (int e = v * Register::elements; e < (v + 1) * Register::elements; ++e) {
      const int from = origin(e) / Register::elements;
      bool is_known = false;
      for (int k = 0; k < found.count; ++k) is_known |= found.registers[k] == from;
      if (!is_known) found.registers[found.count++] = from;
    }
    return found;
  }

  /// Returns the origin of lane `lane` of result `v` when its `k`-th register joins those before: an index into the
  /// lanes of the two operands, -1 for a lane that a later register fills.
  static constexpr int lane_origin(int v, int k, int lane) {
    const int from = origin(v * Register::elements + lane / Register::lanes_of_element);
    const int from_register = from / Register::elements;
    const int from_lane = from % Register::elements * Register::lanes_of_element + lane % Register::lanes_of_element;
    const Origins all = origins(v);
    if (from_register == all.registers[k]) return Register::lanes + from_lane;
    if (k > 1) return lane;
    return from_register == all.registers[0] ? from_lane : -1;
  }

  template <int v, int k, int... lane>
  static NHWC_ALWAYS_INLINE Vector join(const Vector* tile, std::integer_sequence<int, lane...> lanes) {
    constexpr Origins all = origins(v);
    if constexpr (k <= 1) {
      return __builtin_shufflevector(tile[all.registers[0]], tile[all.registers[k]], lane_origin(v, k, lane)...);
    } else {
      return __builtin_shufflevector(join<v, k - 1>(tile, lanes), tile[all.registers[k]], lane_origin(v, k, lane)...);
    }
  }

  template <int v>
  static NHWC_ALWAYS_INLINE Vector result(const Vector* tile) {
#if NHWC_SMALLEST_SHUFFLED > 1
    if constexpr (turn == Turn::deal && radix == 2 && sizeof(typename Register::Lane) < NHWC_SMALLEST_SHUFFLED) {
      return pack<sizeof(typename Register::Lane)>(half<2 * v>(tile), half<2 * v + 1>(tile));
    }
#endif
#if defined(__x86_64__)
    if constexpr (turn == Turn::zip && radix == 2 && sizeof(Vector) == 16 && sizeof(typename Register::Lane) <= 2) {
      return interleave<v, columns + v>(tile);
    }
#endif
    return join<v, origins(v).count - 1>(tile, std::make_integer_sequence<int, Register::lanes>{});
  }

  template <int... v>
  static NHWC_ALWAYS_INLINE void run(Vector* tile, std::integer_sequence<int, v...>) {
    const Vector results[columns] = {result<v>(tile)...};
    ((tile[v] = results[v]), ...);
  }

#if defined(__x86_64__)
  // Zips the halves `a` and `b` of the tile's registers. Compilers shuffle bytes instead, by patterns from memory.
  template <int a, int b>
  static NHWC_ALWAYS_INLINE Vector interleave(const Vector* tile) {
    const auto first = reinterpret_cast<__m128i>(tile[a / 2]), second = reinterpret_cast<__m128i>(tile[b / 2]);
    constexpr bool are_bytes = sizeof(typename Register::Lane) == 1;
    if constexpr (a % 2 == 1 && b % 2 == 1) {
      return reinterpret_cast<Vector>(are_bytes ? _mm_unpackhi_epi8(first, second) : _mm_unpackhi_epi16(first, second));
    } else {
      const __m128i low = a % 2 == 1 ? _mm_unpackhi_epi64(first, first) : first;
      const __m128i high = b % 2 == 1 ? _mm_unpackhi_epi64(second, second) : second;
      return reinterpret_cast<Vector>(are_bytes ? _mm_unpacklo_epi8(low, high) : _mm_unpacklo_epi16(low, high));
    }
  }
#endif

#if NHWC_SMALLEST_SHUFFLED > 1
  // Compilers take elements of 1 and 2 bytes apart to deal them. SSE2 packs wider ones, with saturation: each half of a
  // result is the even or the odd elements of one register, extended to twice their size.
  template <int h>
  static NHWC_ALWAYS_INLINE __m128i half(const Vector* tile) {
    constexpr bool is_odd = h >= columns;
    const auto elements = reinterpret_cast<__m128i>(tile[is_odd ? h - columns : h]);
    if constexpr (sizeof(typename Register::Lane) == 1) {
      return is_odd ? _mm_srli_epi16(elements, 8) : _mm_and_si128(elements, _mm_set1_epi16(0xFF));
    } else {
      return _mm_srai_epi32(is_odd ? elements : _mm_slli_epi32(elements, 16), 16);
    }
  }
  template <int size>
  static NHWC_ALWAYS_INLINE Vector pack(__m128i low, __m128i high) {
    return reinterpret_cast<Vector>(size == 1 ? _mm_packus_epi16(low, high) : _mm_packs_epi32(low, high));
  }
#endif
};

constexpr int smallest_factor(int n) {
  int factor = 2;
  while (n % factor != 0) ++factor;
  return factor;
}

/// Returns the shuffles per register that move the digits of `n` around: a round of radix p for each prime factor p.
constexpr int shuffles_by_factors(int n) {
  return n == 1 ? 0 : smallest_factor(n) - 1 + shuffles_by_factors(n / smallest_factor(n));
}

/// Runs the rounds that move all digits of `carried` around, lowest prime factor first. All factors of a row are 2.
template <typename Register, int columns, Turn turn, int carried>
NHWC_ALWAYS_INLINE void carry_digits(typename Register::Vector* tile) {
  if constexpr (carried > 1) {
    constexpr int radix = smallest_factor(carried);
    Round<Register, columns, turn, radix>::run(tile, std::make_integer_sequence<int, columns>{});
    carry_digits<Register, columns, turn, carried / radix>(tile);
  }
}

/// Transposes a tile: `Register::elements` x `columns`, row-major, to `columns` x `Register::elements`; or back.
template <typename Register, int columns, bool back>
NHWC_ALWAYS_INLINE void transpose_tile(typename Register::Vector* tile) {
  constexpr int rows = Register::elements;
  constexpr bool has_rounds =
      sizeof(typename Register::Lane) >= NHWC_SMALLEST_SHUFFLED || (columns & (columns - 1)) == 0;
  if constexpr (has_rounds && shuffles_by_factors(columns) < shuffles_by_factors(rows)) {
    carry_digits<Register, columns, back ? Turn::zip : Turn::deal, columns>(tile);
  } else {
    carry_digits<Register, columns, back ? Turn::deal : Turn::zip, rows>(tile);
  }
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc

#endif  // NHWC_HAS_SHUFFLES
