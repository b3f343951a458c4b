// Transposes of row-major matrices, with an optional cast: how matrices of every shape are cut into the tiles of the
// zip network.
//
//   one side of up to 27         strips: tiles of all of the short side, one after the other along the long side
//   ... whose lines collide      the same, in parts through a buffer in cache
//   ... both sides very short    many matrices together are one long strip
//   ... with a cast              the same, from a buffer in cache that the elements are cast to
//   both sides longer            square tiles
//   past the caches, if large    the same, into a buffer in cache whose lines are then streamed out
//   no network for this element  plain loops
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "torch_nhwc/cpu/level.h"
#include "torch_nhwc/cpu/zip_network.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {
namespace detail {

using Index = std::int64_t;

// Room on the stack, well within a first-level cache.
constexpr Index buffer_bytes = 8192;

/// Elements that are not cast.
template <typename Element>
struct Keep {
  using From = Element;
  using To = Element;
  NHWC_ALWAYS_INLINE void operator()(const char* source, char* destination, Index count) const {
    std::memcpy(destination, source, static_cast<std::size_t>(count) * sizeof(Element));
  }
};

/// An element of which only the size matters.
template <int size>
struct Opaque {
  char bytes[size];
};

/// Elements that are cast, one by one or, if the cast supports it, many at a time.
template <typename FromType, typename ToType, typename Function>
struct Cast {
  using From = FromType;
  using To = ToType;
  const Function& function;

  NHWC_ALWAYS_INLINE void operator()(const char* source, char* destination, Index count) const {
    const auto* from = reinterpret_cast<const From*>(source);
    auto* to = reinterpret_cast<To*>(destination);
    if constexpr (std::is_invocable_v<const Function&, const From*, To*, Index>) {
      function(from, to, count);
    } else {
      for (Index i = 0; i < count; ++i) to[i] = function(from[i]);
    }
  }
};

/// `count` consecutive matrices of `rows` x `columns` elements, and where their transposes go. A pitch is the
/// distance in elements between consecutive rows of a matrix.
struct Matrices {
  const char* source;
  char* destination;
  Index count, rows, columns;
  Index source_pitch, destination_pitch;
  bool non_temporal;

  bool is_wide() const { return rows < columns; }
  Index short_side() const { return is_wide() ? rows : columns; }
  Index long_side() const { return is_wide() ? columns : rows; }
};

/// Transposes short strips of rows, so that cache lines that they share stay in cache from column to column.
template <typename Way>
void transpose_by_loops(const Matrices& matrices, const Way& way) {
  constexpr Index from_size = sizeof(typename Way::From), to_size = sizeof(typename Way::To), strip = 64;
  const char* source = matrices.source;
  char* destination = matrices.destination;
  for (Index matrix = 0; matrix < matrices.count; ++matrix) {
    for (Index begin = 0; begin < matrices.rows; begin += strip) {
      const Index end = begin + strip < matrices.rows ? begin + strip : matrices.rows;
      for (Index column = 0; column < matrices.columns; ++column) {
        for (Index row = begin; row < end; ++row) {
          way(source + (row * matrices.source_pitch + column) * from_size,
              destination + (column * matrices.destination_pitch + row) * to_size, 1);
        }
      }
    }
    source += matrices.rows * matrices.columns * from_size;
    destination += matrices.rows * matrices.columns * to_size;
  }
}

#if NHWC_HAS_SHUFFLES

// Sides up to this length are the registers of one tile.
constexpr int longest_short_side = 27;

// The same by the size of elements: those of 16 bytes are rare, and squares serve them well.
constexpr int longest_strip_of(int size) { return size < 16 ? longest_short_side : 16; }

/// Loads a tile's registers from `count` rows that are `step` bytes apart.
template <int count, typename Vector>
NHWC_ALWAYS_INLINE void load_tile(Vector* tile, const char* source, Index step) {
#pragma GCC unroll 32
  for (int v = 0; v < count; ++v, source += step) std::memcpy(&tile[v], source, sizeof(Vector));
}

/// Stores a tile's registers to `count` rows that are `step` bytes apart.
template <int count, typename Vector>
NHWC_ALWAYS_INLINE void store_tile(const Vector* tile, char* destination, Index step,
                                   [[maybe_unused]] bool non_temporal) {
#if NHWC_X86_LEVEL >= 3
  if constexpr (sizeof(Vector) == 64) {
    if (non_temporal) {
#pragma GCC unroll 32
      for (int v = 0; v < count; ++v, destination += step) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(destination), reinterpret_cast<__m512i>(tile[v]));
      }
      return;
    }
  }
#endif
#pragma GCC unroll 32
  for (int v = 0; v < count; ++v, destination += step) std::memcpy(destination, &tile[v], sizeof(Vector));
}

/// Transposes tiles along the long side. The last one overlaps the one before it.
template <int size, int width, int tile_columns, bool is_wide>
void transpose_strips(const Matrices& matrices) {
  using Tile = Register<size, width>;
  const Index length = is_wide ? matrices.columns : matrices.rows;
  const Index source_step = is_wide ? matrices.source_pitch * size : width;
  const Index destination_step = is_wide ? width : matrices.destination_pitch * size;
  const bool non_temporal = matrices.non_temporal;
  const char* source = matrices.source;
  char* destination = matrices.destination;
  for (Index matrix = 0; matrix < matrices.count; ++matrix) {
    for (Index begin = 0; begin < length; begin += Tile::elements) {
      if (begin > length - Tile::elements) begin = length - Tile::elements;
      const Index dense = begin * tile_columns;
      typename Tile::Vector tile[tile_columns];
      load_tile<tile_columns>(tile, source + (is_wide ? begin : dense) * size, source_step);
      transpose_tile<Tile, tile_columns, is_wide>(tile);
      store_tile<tile_columns>(tile, destination + (is_wide ? dense : begin) * size, destination_step, non_temporal);
    }
    source += length * tile_columns * size;
    destination += length * tile_columns * size;
  }
}

/// `transpose_strips` for the short side of these matrices, which is at least 2 and at most `longest_short_side`.
template <int size, int width, int... offset>
auto strips_of(const Matrices& matrices, std::integer_sequence<int, offset...>) {
  using Function = void (*)(const Matrices&);
  static constexpr Function tall[] = {transpose_strips<size, width, offset + 2, false>...};
  static constexpr Function wide[] = {transpose_strips<size, width, offset + 2, true>...};
  return (matrices.is_wide() ? wide : tall)[matrices.short_side() - 2];
}
template <int size, int width>
auto strips_of(const Matrices& matrices) {
  return strips_of<size, width>(matrices, std::make_integer_sequence<int, longest_strip_of(size) - 1>{});
}

// A part is at least one register long, for all short sides and all elements.
static_assert(buffer_bytes / (longest_short_side * 16) >= 64 / 16 && buffer_bytes / longest_short_side >= 64);

/// Returns the size of the fewest parts of at most `room` elements that `length` splits into, a multiple of 64 if that
/// fits.
inline Index even_part(Index length, Index room) {
  const Index parts = (length + room - 1) / room, even = (length + parts - 1) / parts;
  const Index rounded = (even + 63) / 64 * 64;
  return rounded <= room && rounded <= length ? rounded : even;
}

/// Transposes strips in parts: distant rows are gathered or scattered by linear copies from or to a buffer.
template <int size, int width>
void transpose_in_parts(const Matrices& matrices) {
  const bool is_wide = matrices.is_wide();
  const Index short_side = matrices.short_side(), long_side = matrices.long_side();
  const Index part = even_part(long_side, buffer_bytes / (short_side * size));
  const auto transpose = strips_of<size, width>(matrices);
  alignas(64) char buffer[buffer_bytes];
  const auto copy_rows = [&](const char* from, Index from_pitch, char* to, Index to_pitch) {
    for (Index row = 0; row < short_side; ++row) {
      std::memcpy(to + row * to_pitch * size, from + row * from_pitch * size, static_cast<std::size_t>(part * size));
    }
  };
  const char* source = matrices.source;
  char* destination = matrices.destination;
  for (Index matrix = 0; matrix < matrices.count; ++matrix) {
    for (Index begin = 0; begin < long_side; begin += part) {
      if (begin > long_side - part) begin = long_side - part;
      const Index dense = begin * short_side;
      if (is_wide) {
        copy_rows(source + begin * size, matrices.source_pitch, buffer, part);
        transpose({buffer, destination + dense * size, 1, short_side, part, part, short_side, false});
      } else {
        transpose({source + dense * size, buffer, 1, part, short_side, short_side, part, false});
        copy_rows(buffer, part, destination + begin * size, matrices.destination_pitch);
      }
    }
    source += short_side * long_side * size;
    destination += short_side * long_side * size;
  }
}

/// Copies `bytes` bytes, or `at_once` if there is room for them.
template <int at_once>
NHWC_ALWAYS_INLINE void copy_piece(const char* from, char* to, Index bytes, bool has_room) {
  if (has_room) {
    std::memcpy(to, from, at_once);
  } else {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

/// Transposes dense matrices that are shorter than a register: rows of many matrices form long strips in a buffer.
template <int size, int width>
void transpose_together(const Matrices& matrices) {
  // Pieces are moved as whole registers, in ascending order, so that each overwrites what the one before it wrote
  // beyond its end; the buffer's rows have room for that.
  constexpr Index room = width / size;
  const bool is_wide = matrices.is_wide();
  const Index short_side = matrices.short_side(), long_side = matrices.long_side();
  const Index piece = long_side * size, together = buffer_bytes / (short_side * piece);
  const auto transpose = strips_of<size, width>(matrices);
  alignas(64) char buffer[buffer_bytes + longest_short_side * width];
  for (Index first = 0; first < matrices.count; first += together) {
    const Index count = first + together < matrices.count ? together : matrices.count - first;
    const char* source = matrices.source + first * short_side * piece;
    char* destination = matrices.destination + first * short_side * piece;
    const Index strip = count * long_side, pitch = strip + room;
    if (strip < room) {
      Matrices rest = matrices;
      rest.source = source, rest.destination = destination, rest.count = matrices.count - first;
      return transpose_by_loops(rest, Keep<Opaque<size>>{});
    }
    if (!is_wide) transpose({source, buffer, 1, strip, short_side, short_side, pitch, false});
    Index dense = 0;
    const Index last_with_room = count * short_side * piece - width;
    for (Index matrix = 0; matrix < count; ++matrix) {
      for (Index row = 0; row < short_side; ++row, dense += piece) {
        char* in_buffer = buffer + row * pitch * size + matrix * piece;
        if (is_wide) {
          copy_piece<width>(source + dense, in_buffer, piece, dense <= last_with_room);
        } else {
          copy_piece<width>(in_buffer, destination + dense, piece, dense <= last_with_room);
        }
      }
    }
    if (is_wide) transpose({buffer, destination, 1, short_side, strip, pitch, short_side, false});
  }
}

/// Returns whether lines that are `pitch` bytes apart use so few sets of a first-level cache (8 ways of 4096 bytes, as
/// most have) that they evict each other before they are complete.
inline bool lines_collide(Index lines, Index pitch) {
  constexpr Index ways = 8, way_bytes = 4096, line_bytes = 64;
  if (lines * pitch < ways * way_bytes) return false;
  Index in_first_set = 0;
  for (Index line = 0; line < lines; ++line) in_first_set += line * pitch % way_bytes < line_bytes;
  return in_first_set >= ways;
}

/// Transposes matrices whose short side is one of strips.
template <int size, int width>
void transpose_narrow(const Matrices& matrices) {
  if (matrices.long_side() < width / size) return transpose_together<size, width>(matrices);
  const Index pitch = (matrices.is_wide() ? matrices.source_pitch : matrices.destination_pitch) * size;
  const bool collide = !matrices.non_temporal && lines_collide(matrices.short_side(), pitch);
  return collide ? transpose_in_parts<size, width>(matrices) : strips_of<size, width>(matrices)(matrices);
}

/// Casts narrow matrices to a buffer in cache, and transposes them from there: many small ones at once, or one in
/// parts.
template <int width, typename Way>
void cast_narrow(const Matrices& matrices, const Way& way) {
  constexpr Index from_size = sizeof(typename Way::From), to_size = sizeof(typename Way::To), line = 64 / to_size;
  const Index rows = matrices.rows, columns = matrices.columns, size = rows * columns;
  const Index long_side = matrices.long_side(), pitch = matrices.destination_pitch;
  const bool is_wide = matrices.is_wide(), non_temporal = matrices.non_temporal;
  // Parts are longer than the longest strip, so that they are wide or tall as the whole is. The last one may be almost
  // twice as long.
  const Index part = buffer_bytes / (matrices.short_side() * to_size) / line * line;
  alignas(64) char buffer[2 * buffer_bytes];
  const char* source = matrices.source;
  char* destination = matrices.destination;
  if (long_side < 2 * part && matrices.source_pitch == columns) {
    const Index fit = buffer_bytes / (size * to_size), together = fit > 1 ? fit : 1;
    for (Index left = matrices.count; left > 0; left -= together) {
      const Index count = left < together ? left : together;
      way(source, buffer, count * size);
      transpose_narrow<to_size, width>({buffer, destination, count, rows, columns, columns, pitch, non_temporal});
      source += count * size * from_size;
      destination += count * size * to_size;
    }
    return;
  }
  for (Index matrix = 0; matrix < matrices.count; ++matrix) {
    for (Index begin = 0, length = part; begin < long_side; begin += length) {
      if (long_side - begin < 2 * part) length = long_side - begin;
      if (is_wide) {
        for (Index row = 0; row < rows; ++row) {
          way(source + (row * matrices.source_pitch + begin) * from_size, buffer + row * length * to_size, length);
        }
        char* to = destination + begin * rows * to_size;
        transpose_narrow<to_size, width>({buffer, to, 1, rows, length, length, rows, non_temporal});
      } else {
        way(source + begin * columns * from_size, buffer, length * columns);
        char* to = destination + begin * to_size;
        transpose_narrow<to_size, width>({buffer, to, 1, length, columns, columns, pitch, non_temporal});
      }
    }
    source += size * from_size;
    destination += size * to_size;
  }
}

/// Transposes square tiles, one row in each register. Blocks of whole cache lines are read and written at once. They
/// run along the short side, which makes one side of the copy linear, unless that is the source and the destination's
/// lines collide.
template <typename Way, int width>
void transpose_squares(const Matrices& matrices, const Way& way) {
  constexpr Index from_size = sizeof(typename Way::From), to_size = sizeof(typename Way::To);
  using Tile = Register<to_size, width>;
  constexpr Index side = Tile::elements, line = side * to_size < 64 ? 64 / to_size : side;
  const Index rows = matrices.rows, columns = matrices.columns;
  const Index source_step = matrices.source_pitch * from_size, destination_step = matrices.destination_pitch * to_size;
  const char* source = matrices.source;
  char* destination = matrices.destination;
  const auto transpose_block = [&](Index first_row, Index first_column) {
    for (Index row = first_row; row < rows && row < first_row + line; row += side) {
      if (row > rows - side) row = rows - side;
      for (Index column = first_column; column < columns && column < first_column + line; column += side) {
        if (column > columns - side) column = columns - side;
        typename Tile::Vector tile[side];
        const char* from = source + row * source_step + column * from_size;
        if constexpr (std::is_same_v<Way, Keep<typename Way::To>>) {
          load_tile<side>(tile, from, source_step);
        } else {
          alignas(64) char cast[side * width];
          for (Index v = 0; v < side; ++v) way(from + v * source_step, cast + v * width, side);
          load_tile<side>(tile, cast, width);
        }
        transpose_tile<Tile, side, false>(tile);
        store_tile<side>(tile, destination + column * destination_step + row * to_size, destination_step, false);
      }
    }
  };
  const bool is_columnwise = matrices.is_wide() || lines_collide(columns, destination_step);
  for (Index matrix = 0; matrix < matrices.count; ++matrix) {
    if (is_columnwise) {
      for (Index column = 0; column < columns; column += line) {
        for (Index row = 0; row < rows; row += line) transpose_block(row, column);
      }
    } else {
      for (Index row = 0; row < rows; row += line) {
        for (Index column = 0; column < columns; column += line) transpose_block(row, column);
      }
    }
    source += rows * columns * from_size;
    destination += rows * columns * to_size;
  }
}

#if NHWC_X86_LEVEL >= 2

// Room on the stack for filters on their way past the caches, and for their shared lines. A second-level cache has it.
constexpr Index streamed_bytes = 65536;

// A part of a filter that is larger than that: a third of a first-level cache, with two rooms for the last part.
constexpr Index streamed_part_bytes = 16384;

/// Returns whether a filter is transposed by `transpose_streamed`: smaller ones are faster through the caches.
inline bool serves_streaming(Index rows, Index columns, Index size) {
  constexpr Index smallest = 16384, longest_of_both = 64;
  const Index bytes = rows * columns * size;
  if (bytes < smallest) return false;
  return (rows < columns ? rows : columns) <= longest_of_both || (rows >= columns && bytes <= streamed_bytes);
}

/// Writes one cache line past the caches.
NHWC_ALWAYS_INLINE void stream_line(const char* from, char* to) {
#if NHWC_X86_LEVEL >= 3
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
#else
  for (int i = 0; i < 64; i += 32) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), half);
  }
#endif
}

/// Streams a part of a row out of a buffer whose cache lines correspond to those of the destination. The first and the
/// last line of a row are shared with its neighbours, and go through the caches. Between parts, what does not fill a
/// line stays in the buffer, before the place of the next part. For each line, `step` bytes from `ahead` on are
/// prefetched into the second-level cache, so that reads and writes overlap.
inline const char* stream_out(char* buffer, char* destination, Index bytes, bool is_first, bool is_last,
                              const char* ahead, Index step) {
  const auto phase = static_cast<Index>(reinterpret_cast<std::uintptr_t>(destination) % 64);
  Index i = -phase;
  if (is_first && phase > 0) {
    i += 64;
    std::memcpy(destination, buffer, static_cast<std::size_t>(i));
  }
  for (; i + 64 <= bytes; i += 64, ahead += step) {
    for (Index k = 0; k < step; k += 64) __builtin_prefetch(ahead + k, /*rw=*/0, /*locality=*/2);
    stream_line(buffer + i, destination + i);
  }
  if (is_last) {
    std::memcpy(destination + i, buffer + i, static_cast<std::size_t>(bytes - i));
  } else {
    std::memcpy(buffer - phase, buffer + i, 64);
  }
  return ahead;
}

/// Transposes large dense matrices into a buffer in cache, and streams its lines out: all of a matrix, or parts along
/// the long side. Parts of a wide matrix are consecutive in the destination; those of a tall one are in all its rows.
template <int width, typename Way>
void transpose_streamed(const Matrices& matrices, const Way& way) {
  constexpr Index from_size = sizeof(typename Way::From), to_size = sizeof(typename Way::To), line = 64 / to_size;
  constexpr Index step = 64 * from_size / to_size;
  constexpr int square_width = to_size * 16 < width ? to_size * 16 : width;
  const Index rows = matrices.rows, columns = matrices.columns, size = rows * columns;
  const Index short_side = matrices.short_side(), long_side = matrices.long_side();
  const bool is_wide = matrices.is_wide();
  const bool is_whole = !is_wide && size * to_size <= streamed_bytes && !lines_collide(columns, rows * to_size);
  const bool is_linear = is_wide || is_whole;
  // Parts are longer than the longest strip, so that those of strips are wide or tall as the whole is.
  const bool is_strip = short_side <= longest_strip_of(to_size);
  const Index part = is_whole ? long_side : streamed_part_bytes / (short_side * to_size) / line * line;
  const Index pitch = is_linear ? rows : 2 * part + line + rows % line;
  alignas(64) char room[64 + streamed_bytes + 64];
  const char* source = matrices.source;
  char* destination = matrices.destination;
  for (Index matrix = 0; matrix < matrices.count; ++matrix) {
    char* buffer = room + 64 + reinterpret_cast<std::uintptr_t>(destination) % 64;
    const char* ahead = source + size * from_size;
    for (Index begin = 0, length = part; begin < long_side; begin += length) {
      if (long_side - begin < 2 * part) length = long_side - begin;
      const bool is_first = begin == 0, is_last = begin + length == long_side;
      const Index block_rows = is_linear ? rows : length, block_columns = is_wide ? length : columns;
      const Index first = begin * (is_wide ? 1 : columns), pieces = is_linear ? 1 : columns;
      const Index bytes = is_linear ? rows * block_columns * to_size : length * to_size;
      const Matrices block = {source + first * from_size, buffer, 1, block_rows, block_columns, columns, pitch, false};
      if (!is_strip) {
        transpose_squares<Way, square_width>(block, way);
      } else if constexpr (std::is_same_v<Way, Keep<typename Way::To>>) {
        strips_of<to_size, width>(block)(block);
      } else {
        cast_narrow<width>(block, way);
      }
      for (Index piece = 0; piece < pieces; ++piece) {
        ahead = stream_out(buffer + piece * pitch * to_size,
                           destination + (piece * rows + begin * (is_wide ? rows : 1)) * to_size, bytes, is_first,
                           is_last, ahead, step);
      }
    }
    source += size * from_size;
    destination += size * to_size;
  }
}

#endif  // NHWC_X86_LEVEL >= 2

#endif  // NHWC_HAS_SHUFFLES

/// Returns whether there is a network for an element of this size.
constexpr bool is_shuffled(int size) { return NHWC_HAS_SHUFFLES && size <= 16 && (size & (size - 1)) == 0; }

/// Transposes with registers of `width` bytes. Both sides are at least 2.
template <int width, typename Way>
void transpose(const Matrices& matrices, const Way& way) {
#if NHWC_HAS_SHUFFLES
  constexpr int size = sizeof(typename Way::To);
  if constexpr (is_shuffled(size)) {
    constexpr int square_width = size * 16 < width ? size * 16 : width;
    if (matrices.short_side() > longest_strip_of(size)) return transpose_squares<Way, square_width>(matrices, way);
    if constexpr (std::is_same_v<Way, Keep<typename Way::To>>) {
      return transpose_narrow<size, width>(matrices);
    } else {
      return cast_narrow<width>(matrices, way);
    }
  }
#endif
  transpose_by_loops(matrices, way);
}

}  // namespace detail
}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
