// Depthwise convolutions for one instruction set, a register of channels at a time.
//
// The positions that a block reads are first copied, as numbers and with zeros for the padding, so that they are
// neighbours in memory: the loops over them have neither casts nor borders, and their rows stay in the cache.
#pragma once

#include "cpu/depthwise_kernels.h"
#include "cpu/isa/vectors.h"

#if defined(__clang__)
#define NHWC_UNROLL _Pragma("unroll")
#else
#define NHWC_UNROLL _Pragma("GCC unroll 16")
#endif

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

/// Positions of an array along depth, height and width. Some may be outside of it.
struct Box {
  std::int64_t begin[3], size[3];
  std::int64_t positions() const { return size[0] * size[1] * size[2]; }
};

inline Box source_box(const cpu::DepthwiseCorrelation& correlation, const cpu::DepthwiseBlock& block) {
  Box box;
  for (int a = 0; a < 3; ++a) {
    const cpu::DepthwiseAxis& axis = correlation.axes[a];
    box.begin[a] = axis.begin + block.begin[a] * axis.stride;
    box.size[a] = axis.taps == 0 ? 0 : (block.size[a] - 1) * axis.stride + (axis.taps - 1) * axis.dilation + 1;
  }
  return box;
}

inline std::int64_t kernel_size(const cpu::DepthwiseCorrelation& correlation) {
  return correlation.axes[0].kernel * correlation.axes[1].kernel * correlation.axes[2].kernel;
}

template <typename Number>
std::int64_t depthwise_scratch_size(const cpu::DepthwiseCorrelation& correlation, const cpu::DepthwiseBlock& block) {
  const std::int64_t copied =
      correlation.parts * (source_box(correlation, block).positions() + kernel_size(correlation));
  return (copied + block.size[0] * block.size[1] * block.size[2] + 1) * VectorOf<Number>::lanes;
}

/// The channels of a register: where they are in a position's channels.
template <typename Element>
struct Lanes {
  std::int64_t offsets[VectorOf<Real<Element>>::lanes];
  int count;
  bool are_neighbours;

  Lanes(const cpu::DepthwiseBlock& block, std::int64_t repeats, std::int64_t parts, std::int64_t part)
      : count(static_cast<int>(block.channels)),
        are_neighbours(count == VectorOf<Real<Element>>::lanes && repeats == 1 && parts == 1) {
    for (int lane = 0; lane < count; ++lane) offsets[lane] = (block.channel + lane) / repeats * parts + part;
  }
};

/// Copies a box of an array, with a register for each position.
template <typename Element>
void copy_box(const Element* array, const std::int64_t* sizes, std::int64_t channels, const Lanes<Element>& lanes,
              const Box& box, Real<Element>* out) {
  using Number = Real<Element>;
  constexpr int width = VectorOf<Number>::lanes;
  const std::int64_t before = box.begin[2] < 0 ? -box.begin[2] : 0, end = sizes[2] - box.begin[2];
  for (std::int64_t d = box.begin[0]; d < box.begin[0] + box.size[0]; ++d) {
    for (std::int64_t h = box.begin[1]; h < box.begin[1] + box.size[1]; ++h, out += box.size[2] * width) {
      const bool is_inside = d >= 0 && d < sizes[0] && h >= 0 && h < sizes[1];
      const Element* row = array + ((d * sizes[1] + h) * sizes[2] + box.begin[2]) * channels;
      std::int64_t w = 0;
      const auto clear = [&](std::int64_t until) {
        for (; w < until && w < box.size[2]; ++w) store(out + w * width, Vector<Number>{});
      };
      clear(is_inside ? before : box.size[2]);
      if (lanes.are_neighbours) {
        const Element* first = row + lanes.offsets[0];
        for (; w < end && w < box.size[2]; ++w) {
          store(out + w * width, load(first + w * channels));
          __builtin_prefetch(first + w * channels + width, 0, 2);  // for the next register
        }
      } else {
        for (; w < end && w < box.size[2]; ++w) {
          Vector<Number> value{};
          for (int lane = 0; lane < lanes.count; ++lane)
            value[lane] = load_one(row + w * channels + lanes.offsets[lane]);
          store(out + w * width, value);
        }
      }
      clear(box.size[2]);
    }
  }
}

/// A range of indexes.
struct Range {
  std::int64_t begin, end;
  std::int64_t size() const { return end - begin; }
};

/// Returns the first to the last index below `count` for which `holds`.
template <typename Holds>
Range range_where(std::int64_t count, const Holds& holds) {
  Range range{0, count};
  while (range.begin < range.end && !holds(range.begin)) ++range.begin;
  while (range.begin < range.end && !holds(range.end - 1)) --range.end;
  return range;
}

/// Returns the taps that see a source inside of the array.
inline Range taps_inside(const cpu::DepthwiseAxis& axis, std::int64_t i) {
  return range_where(axis.taps, [&](std::int64_t k) {
    const std::int64_t source = axis.begin + i * axis.stride + k * axis.dilation;
    return source >= 0 && source < axis.source;
  });
}

/// A loop over the sources and the weights of a sum, and the numbers from one to the next.
struct TapLoop {
  std::int64_t count, source, weight;
};

/// The loops of a sum, from the outermost: parts, planes, rows and taps of a row.
struct TapLoops {
  TapLoop parts, planes, rows, taps;
  std::int64_t stride;  // from the sources of one sum to those of the next
};

/// Adds the taps of `width` sources in a row to `tile` sums, without a stride or a dilation. A source is loaded once
/// for all sums.
template <typename Number, int tile, int width>
NHWC_ALWAYS_INLINE void add_row(Vector<Number>* sums, const Number* source, const Number* weight) {
  constexpr int lanes = VectorOf<Number>::lanes;
  Vector<Number> weights[width];
  NHWC_UNROLL
  for (int k = 0; k < width; ++k) weights[k] = load(weight + k * lanes);
  NHWC_UNROLL
  for (int i = 0; i < tile + width - 1; ++i) {
    const Vector<Number> value = load(source + i * lanes);
    NHWC_UNROLL
    for (int t = 0; t < tile; ++t) {
      if (i >= t && i - t < width) sums[t] += value * weights[i - t];
    }
  }
}

/// Adds any number of taps.
template <typename Number, int tile>
NHWC_ALWAYS_INLINE void add_any_row(Vector<Number>* sums, const Number* source, const Number* weight,
                                    const TapLoops& loops) {
  for (std::int64_t k = 0; k < loops.taps.count; ++k, source += loops.taps.source, weight += loops.taps.weight) {
    const Vector<Number> factor = load(weight);
    for (int t = 0; t < tile; ++t) sums[t] += factor * load(source + t * loops.stride);
  }
}

/// Writes the sums of a row, `tile` of them at a time; the last tile may overlap the one before. The width is 0 if it
/// is not constant.
template <typename Number, int tile, int width>
void sum_row(const Number* source, const Number* weight, const TapLoops& loops, std::int64_t count, Vector<Number> bias,
             Number* out) {
  constexpr int lanes = VectorOf<Number>::lanes;
  const TapLoop parts = loops.parts, planes = loops.planes, rows = loops.rows;
  for (std::int64_t i = 0; i < count; i += tile) {
    const std::int64_t first = i + tile <= count ? i : count - tile;
    Vector<Number> sums[tile];
    for (int t = 0; t < tile; ++t) sums[t] = bias;
    for (std::int64_t part = 0; part < parts.count; ++part) {
      for (std::int64_t plane = 0; plane < planes.count; ++plane) {
        const Number* row = source + first * loops.stride + part * parts.source + plane * planes.source;
        const Number* row_weight = weight + part * parts.weight + plane * planes.weight;
        for (std::int64_t r = 0; r < rows.count; ++r, row += rows.source, row_weight += rows.weight) {
          if constexpr (width != 0) {
            add_row<Number, tile, width>(sums, row, row_weight);
          } else {
            add_any_row<Number, tile>(sums, row, row_weight, loops);
          }
        }
      }
    }
    for (int t = 0; t < tile; ++t) store(out + (first + t) * lanes, sums[t]);
  }
}

constexpr int most_tile = 8;

template <typename Number, int width, int... tiles>
auto find_tile(int tile, std::integer_sequence<int, tiles...>) {
  constexpr decltype(&sum_row<Number, 1, 0>) by_tile[] = {sum_row<Number, tiles + 1, (tiles < 3 ? 0 : width)>...};
  return by_tile[tile - 1];
}

/// Returns `sum_row` for `count` sums, in tiles of nearly equal size.
template <typename Number>
auto find_sum_row(std::int64_t count, const TapLoops& loops) {
  constexpr int lanes = VectorOf<Number>::lanes;
  const std::int64_t tiles = (count + most_tile - 1) / most_tile;
  const int tile = static_cast<int>((count + tiles - 1) / tiles);
  constexpr std::make_integer_sequence<int, most_tile> all;
  const bool is_dense = loops.stride == lanes && loops.taps.source == lanes;
  switch (is_dense ? loops.taps.count : 0) {
    case 3: return find_tile<Number, 3>(tile, all);
    case 5: return find_tile<Number, 5>(tile, all);
    case 7: return find_tile<Number, 7>(tile, all);
    default: return find_tile<Number, 0>(tile, all);
  }
}

template <typename Element>
void correlate(const cpu::DepthwiseCorrelation& correlation, const cpu::DepthwiseBlock& block, const void* source,
               void* destination, const void* weight, const void* bias, void* scratch) {
  using Number = Real<Element>;
  constexpr int lanes = VectorOf<Number>::lanes;
  const auto& [depth, height, width] = correlation.axes;
  const std::int64_t channels = correlation.destination_channels, kernel = kernel_size(correlation);
  const std::int64_t sizes[] = {depth.source, height.source, width.source};
  const Box box = source_box(correlation, block);

  auto* sources = static_cast<Number*>(scratch);
  const std::int64_t row_size = box.size[2] * lanes, plane_size = box.size[1] * row_size,
                     size = box.positions() * lanes;
  for (std::int64_t part = 0; part < correlation.parts; ++part) {
    copy_box(static_cast<const Element*>(source), sizes, correlation.source_channels,
             Lanes<Element>(block, correlation.repeats, correlation.parts, part), box, sources + part * size);
  }
  Number* weights = sources + correlation.parts * size;
  Number* out = weights;
  for (std::int64_t part = 0; part < correlation.parts; ++part) {
    const Number* from = static_cast<const Number*>(weight) + part * kernel * channels + block.channel;
    for (std::int64_t d = 0; d < depth.taps; ++d) {
      for (std::int64_t h = 0; h < height.taps; ++h) {
        for (std::int64_t w = 0; w < width.taps; ++w, out += lanes) {
          const std::int64_t plane = depth.first_tap + d * depth.tap_step,
                             row = plane * height.kernel + height.first_tap + h * height.tap_step,
                             tap = row * width.kernel + width.first_tap + w * width.tap_step;
          store(out, load(from + tap * channels));
        }
      }
    }
  }

  const Vector<Number> start = bias ? load(static_cast<const Number*>(bias) + block.channel) : Vector<Number>{};
  const std::int64_t count = block.size[2], row_weights = width.taps * lanes, plane_weights = height.taps * row_weights;
  TapLoops loops{{correlation.parts, size, depth.taps * plane_weights},
                 {0, depth.dilation * plane_size, plane_weights},
                 {0, height.dilation * row_size, row_weights},
                 {width.taps, width.dilation * lanes, lanes},
                 width.stride * lanes};
  const auto sum = find_sum_row<Number>(count, loops);
  for (std::int64_t d = block.begin[0]; d < block.begin[0] + block.size[0]; ++d) {
    const Range planes = taps_inside(depth, d);
    for (std::int64_t h = block.begin[1]; h < block.begin[1] + block.size[1]; ++h) {
      const Range rows = taps_inside(height, h);
      loops.planes.count = planes.size(), loops.rows.count = rows.size();
      const std::int64_t plane = depth.begin + d * depth.stride + planes.begin * depth.dilation - box.begin[0],
                         row = height.begin + h * height.stride + rows.begin * height.dilation - box.begin[1],
                         column = width.begin + block.begin[2] * width.stride - box.begin[2];
      sum(sources + plane * plane_size + row * row_size + column * lanes,
          weights + planes.begin * plane_weights + rows.begin * row_weights, loops, count, start, out);
      const std::int64_t to_row = (depth.first + d * depth.step) * height.destination + height.first + h * height.step,
                         to_column = width.first + block.begin[2] * width.step;
      auto* to =
          static_cast<Element*>(destination) + (to_row * width.destination + to_column) * channels + block.channel;
      if (block.channels == lanes) {
        for (std::int64_t i = 0; i < count; ++i) store(to + i * width.step * channels, load(out + i * lanes));
      } else {
        for (std::int64_t i = 0; i < count; ++i) {
          for (int lane = 0; lane < block.channels; ++lane) {
            store_one(to + i * width.step * channels + lane, out[i * lanes + lane]);
          }
        }
      }
    }
  }
}

/// The rows of a product of gradients and sources. Steps are in numbers.
struct ProductRows {
  std::int64_t rows, columns;
  std::int64_t grad_row, source_row, source_column;
  std::int64_t tap_row, tap_column, sum_row;
};

/// Adds the products of `rows` kernel rows by `columns` taps to their sums.
template <typename Number, int rows, int columns>
void add_products(const Number* grad, const Number* source, const ProductRows& product, Number* sums) {
  constexpr int lanes = VectorOf<Number>::lanes;
  Vector<Number> added[rows * columns] = {};
  for (std::int64_t row = 0; row < product.rows; ++row) {
    const Number *g = grad + row * product.grad_row, *from = source + row * product.source_row;
    for (std::int64_t column = 0; column < product.columns; ++column, from += product.source_column) {
      const Vector<Number> factor = load(g + column * lanes);
      for (int r = 0; r < rows; ++r) {
        for (int k = 0; k < columns; ++k) {
          added[r * columns + k] += factor * load(from + r * product.tap_row + k * product.tap_column);
        }
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int k = 0; k < columns; ++k) {
      Number* sum = sums + r * product.sum_row + k * lanes;
      store(sum, load(sum) + added[r * columns + k]);
    }
  }
}

constexpr int most_product_columns = 7;

/// Returns the kernel rows whose sums, with a factor, fit into 16 registers.
constexpr int most_product_rows(int columns) { return columns < 4 ? 4 : 15 / columns; }

template <typename Number, int columns>
auto find_product_of_columns(int rows) {
  constexpr int most = most_product_rows(columns);
  constexpr decltype(&add_products<Number, 1, 1>) by_rows[] = {
      add_products<Number, 1, columns>,
      add_products < Number,
      most < 2 ? most : 2,
      columns >
      , add_products < Number, most < 3 ? most : 3, columns >, add_products<Number, most, columns>};
  return by_rows[rows - 1];
}

template <typename Number, int... columns>
auto find_product(int count, int rows, std::integer_sequence<int, columns...>) {
  constexpr decltype(&find_product_of_columns<Number, 1>) by_columns[] = {
      find_product_of_columns<Number, columns + 1>...};
  return by_columns[count - 1](rows);
}

template <typename Element>
void add_weight_gradient(const cpu::DepthwiseCorrelation& correlation, const cpu::DepthwiseBlock& block,
                         const void* source, const void* grad, void* sums, void* scratch) {
  using Number = Real<Element>;
  constexpr int lanes = VectorOf<Number>::lanes;
  constexpr std::int64_t most_terms = 256;  // of a sum in a register: few, for the sake of accuracy
  const auto& [depth, height, width] = correlation.axes;
  const std::int64_t taps = kernel_size(correlation);
  const std::int64_t source_sizes[] = {depth.source, height.source, width.source},
                     grad_sizes[] = {depth.destination, height.destination, width.destination};
  const Box box = source_box(correlation, block);
  const Box grad_box{{block.begin[0], block.begin[1], block.begin[2]}, {block.size[0], block.size[1], block.size[2]}};

  auto* sources = static_cast<Number*>(scratch);
  Number* grads = sources + box.positions() * lanes;
  Number* added = grads + grad_box.positions() * lanes;
  copy_box(static_cast<const Element*>(source), source_sizes, correlation.source_channels,
           Lanes<Element>(block, correlation.repeats, 1, 0), box, sources);
  copy_box(static_cast<const Element*>(grad), grad_sizes, correlation.destination_channels,
           Lanes<Element>(block, 1, 1, 0), grad_box, grads);
  for (std::int64_t tap = 0; tap <= taps; ++tap) store(added + tap * lanes, Vector<Number>{});

  const std::int64_t grad_row = block.size[2] * lanes, grad_plane = block.size[1] * grad_row;
  const std::int64_t row_size = box.size[2] * lanes, plane_size = box.size[1] * row_size;
  const std::int64_t rows_at_once = block.size[2] < most_terms ? most_terms / block.size[2] : 1;
  // Indexes of the block for which one of some taps sees a source inside of the array.
  const auto inside = [&](int a, std::int64_t first_tap, std::int64_t count) {
    const cpu::DepthwiseAxis& axis = correlation.axes[a];
    return range_where(block.size[a], [&](std::int64_t i) {
      const std::int64_t from = axis.begin + (block.begin[a] + i) * axis.stride + first_tap * axis.dilation;
      return from < axis.source && from + (count - 1) * axis.dilation >= 0;
    });
  };
  const std::int64_t chunks = (width.taps + most_product_columns - 1) / most_product_columns;
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    const std::int64_t column = width.taps * chunk / chunks, columns = width.taps * (chunk + 1) / chunks - column;
    const Range across = inside(2, column, columns);
    const int most_rows = most_product_rows(static_cast<int>(columns));
    for (std::int64_t row = 0, rows; row < height.taps; row += rows) {
      rows = height.taps - row < most_rows ? height.taps - row : most_rows;
      const auto add = find_product<Number>(static_cast<int>(columns), static_cast<int>(rows),
                                            std::make_integer_sequence<int, most_product_columns>());
      const Range down = inside(1, row, rows);
      for (std::int64_t plane = 0; plane < depth.taps; ++plane) {
        const Range deep = inside(0, plane, 1);
        Number* to = added + ((plane * height.taps + row) * width.taps + column) * lanes;
        for (std::int64_t d = deep.begin; d < deep.end; ++d) {
          for (std::int64_t h = down.begin; h < down.end; h += rows_at_once) {
            const std::int64_t left = down.end - h;
            const ProductRows product{left < rows_at_once ? left : rows_at_once,
                                      across.size(),
                                      grad_row,
                                      height.stride * row_size,
                                      width.stride * lanes,
                                      height.dilation * row_size,
                                      width.dilation * lanes,
                                      width.taps * lanes};
            const std::int64_t from_plane = d * depth.stride + plane * depth.dilation,
                               from_row = h * height.stride + row * height.dilation,
                               from_column = across.begin * width.stride + column * width.dilation;
            add(grads + d * grad_plane + h * grad_row + across.begin * lanes,
                sources + from_plane * plane_size + from_row * row_size + from_column * lanes, product, to);
          }
        }
      }
    }
  }
  // Four sums at a time, so that one addition need not wait for the one before.
  const std::int64_t positions = grad_box.positions();
  for (std::int64_t begin = 0; begin < positions; begin += 4 * most_terms) {
    const std::int64_t end = positions - begin < 4 * most_terms ? positions : begin + 4 * most_terms;
    Vector<Number> sum[4] = {};
    std::int64_t i = begin;
    for (; i + 4 <= end; i += 4) {
      for (int t = 0; t < 4; ++t) sum[t] += load(grads + (i + t) * lanes);
    }
    for (; i < end; ++i) sum[0] += load(grads + i * lanes);
    store(added + taps * lanes, load(added + taps * lanes) + ((sum[0] + sum[1]) + (sum[2] + sum[3])));
  }
  auto* total = static_cast<Number*>(sums);
  for (std::int64_t k = 0; k < (taps + 1) * lanes; k += lanes) store(total + k, load(total + k) + load(added + k));
}

template <typename Element>
constexpr cpu::DepthwiseKernels make_depthwise_kernels() {
  using Number = Real<Element>;
  return {VectorOf<Number>::lanes, depthwise_scratch_size<Number>, correlate<Element>, add_weight_gradient<Element>};
}

constexpr cpu::DepthwiseKernelsByType make_all_depthwise_kernels() {
  return {make_depthwise_kernels<double>(), make_depthwise_kernels<float>(), make_depthwise_kernels<Half>(),
          make_depthwise_kernels<BFloat16>()};
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
