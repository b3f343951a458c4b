// Depthwise convolutions for one instruction set, a register of channels at a time.
//
// The positions that a block reads are first copied, as numbers and with zeros for the padding, so that they are
// neighbours in memory: the loops over them have neither casts nor borders, and their rows stay in the cache.
#pragma once

#include "cpu/depthwise_kernels.h"
#include "cpu/isa/vectors.h"
#include "cpu/work/rows.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

/// What is packed for the results of a block: a register for each position, `[D, H, W, lanes]`.
struct PackedBox {
  cpu::PackedAxis axes[3];

  PackedBox(const cpu::TapAxis* taps, const cpu::DepthwiseBlock& block) {
    for (int a = 0; a < 3; ++a) axes[a] = cpu::packed_axis(taps[a], block.size[a]);
  }
  std::int64_t rows() const { return axes[0].positions() * axes[1].positions(); }
  std::int64_t positions() const { return rows() * axes[2].positions(); }

  /// Returns the positions before those that a tap of each axis sees for a result of each.
  std::int64_t position_of(const std::int64_t* results, const std::int64_t* taps) const {
    std::int64_t position = 0;
    for (int a = 0; a < 3; ++a) {
      position = position * axes[a].positions() + results[a] * axes[a].step + taps[a] * axes[a].tap_step;
    }
    return position;
  }
};

inline std::int64_t kernel_size(const cpu::DepthwiseCorrelation& correlation) {
  return correlation.axes[0].kernel * correlation.axes[1].kernel * correlation.axes[2].kernel;
}

template <typename Number>
std::int64_t depthwise_scratch_size(const cpu::DepthwiseCorrelation& correlation, const cpu::DepthwiseBlock& block) {
  const std::int64_t copied =
      correlation.parts * (PackedBox(correlation.axes, block).positions() + kernel_size(correlation));
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

/// Packs a part of a row, `[W, channels]`, as `[W, lanes]`: what is outside of it as zeros.
template <typename Element>
void pack_segment(const Element* row, std::int64_t channels, const Lanes<Element>& lanes, const cpu::PackedAxis& axis,
                  const cpu::Segment& segment, Real<Element>* out) {
  using Number = Real<Element>;
  constexpr int width = VectorOf<Number>::lanes;
  const auto [begin, end] = segment.inside;
  const std::int64_t step = axis.source_step * channels;
  const Element* from = row + segment.source * channels;
  for (std::int64_t w = 0; w < begin; ++w) store_vector(out + w * width, Vector<Number>{});
  if (lanes.are_neighbours) {
    const Element* first = from + lanes.offsets[0];
    for (std::int64_t w = begin; w < end; ++w, first += step) {
      store_vector(out + w * width, load_vector(first));
      __builtin_prefetch(first + width, 0, 2);  // for the next register
    }
  } else {
    for (std::int64_t w = begin; w < end; ++w, from += step) {
      Vector<Number> value{};
      for (int lane = 0; lane < lanes.count; ++lane) value[lane] = load_one(from + lanes.offsets[lane]);
      store_vector(out + w * width, value);
    }
  }
  for (std::int64_t w = end; w < axis.length; ++w) store_vector(out + w * width, Vector<Number>{});
}

/// Packs a box of an array, `[D, H, W, channels]`, for results from `first` on. Planes outside of the array stay
/// unwritten: no tap reads them.
template <typename Element>
void pack_box(const Element* array, std::int64_t channels, const Lanes<Element>& lanes, const PackedBox& box,
              const std::int64_t* first, Real<Element>* out) {
  constexpr int width_of_position = VectorOf<Real<Element>>::lanes;
  const auto& [depth, height, width] = box.axes;
  const std::int64_t row_numbers = width.positions() * width_of_position;
  for (std::int64_t index = 0; index < width.segments; ++index, out += width.length * width_of_position) {
    const cpu::Segment segment = cpu::segment_of(width, first[2], index), outside{{width.length, width.length}, 0};
    for (std::int64_t d = 0; d < depth.positions(); ++d) {
      const std::int64_t plane = depth.source_of(first[0], d);
      if (plane < 0 || plane >= depth.source) continue;
      Real<Element>* to = out + d * height.positions() * row_numbers;
      for (std::int64_t h = 0; h < height.positions(); ++h, to += row_numbers) {
        const std::int64_t row = height.source_of(first[1], h);
        const bool is_inside = row >= 0 && row < height.source;
        pack_segment(array + (plane * height.source + row) * width.source * channels, channels, lanes, width,
                     is_inside ? segment : outside, to);
      }
    }
  }
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
  for (int k = 0; k < width; ++k) weights[k] = load_vector(weight + k * lanes);
  NHWC_UNROLL
  for (int i = 0; i < tile + width - 1; ++i) {
    const Vector<Number> value = load_vector(source + i * lanes);
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
    const Vector<Number> factor = load_vector(weight);
    for (int t = 0; t < tile; ++t) sums[t] += factor * load_vector(source + t * loops.stride);
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
    for (int t = 0; t < tile; ++t) store_vector(out + (first + t) * lanes, sums[t]);
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

/// Collects the weights of a register of channels from `[parts, kernel..., channels]`, as `[parts, taps..., lanes]`.
template <typename Number>
void collect_weights(const cpu::DepthwiseCorrelation& correlation, const Number* weight, Number* out) {
  const auto& [depth, height, width] = correlation.axes;
  for (std::int64_t part = 0; part < correlation.parts; ++part) {
    for (std::int64_t d = 0; d < depth.taps; ++d) {
      for (std::int64_t h = 0; h < height.taps; ++h) {
        for (std::int64_t w = 0; w < width.taps; ++w, out += VectorOf<Number>::lanes) {
          const std::int64_t row = (part * depth.kernel + depth.weight_of(d)) * height.kernel + height.weight_of(h);
          store_vector(out,
                       load_vector(weight + (row * width.kernel + width.weight_of(w)) * correlation.result_channels));
        }
      }
    }
  }
}

/// Writes the sums of a row, `[W, lanes]`, to every `stride` elements of the result.
template <typename Element>
void write_row(const Real<Element>* sums, std::int64_t count, std::int64_t lanes, std::int64_t stride, Element* out) {
  constexpr int width = VectorOf<Real<Element>>::lanes;
  for (std::int64_t i = 0; i < count; ++i, out += stride, sums += width) {
    if (lanes == width) {
      store_vector(out, load_vector(sums));
    } else {
      for (std::int64_t lane = 0; lane < lanes; ++lane) store_one(out + lane, sums[lane]);
    }
  }
}

template <typename Element>
void correlate(const cpu::DepthwiseCorrelation& correlation, const cpu::DepthwiseBlock& block, const void* source,
               void* result, const void* weight, const void* bias, void* scratch) {
  using Number = Real<Element>;
  constexpr int lanes = VectorOf<Number>::lanes;
  const auto& [depth, height, width] = correlation.axes;
  const PackedBox box(correlation.axes, block);
  const std::int64_t channels = correlation.result_channels, size = box.positions() * lanes;

  auto* sources = static_cast<Number*>(scratch);
  for (std::int64_t part = 0; part < correlation.parts; ++part) {
    pack_box(static_cast<const Element*>(source), correlation.source_channels,
             Lanes<Element>(block, correlation.repeats, correlation.parts, part), box, block.begin,
             sources + part * size);
  }
  Number* weights = sources + correlation.parts * size;
  Number* row_sums = weights + correlation.parts * depth.taps * height.taps * width.taps * lanes;
  collect_weights(correlation, static_cast<const Number*>(weight) + block.channel, weights);

  const Vector<Number> start = bias ? load_vector(static_cast<const Number*>(bias) + block.channel) : Vector<Number>{};
  const std::int64_t row_size = box.axes[2].positions() * lanes, plane_size = box.axes[1].positions() * row_size;
  const std::int64_t row_weights = width.taps * lanes, plane_weights = height.taps * row_weights;
  TapLoops loops{{correlation.parts, size, depth.taps * plane_weights},
                 {0, box.axes[0].tap_step * plane_size, plane_weights},
                 {0, box.axes[1].tap_step * row_size, row_weights},
                 {width.taps, box.axes[2].tap_step * lanes, lanes},
                 box.axes[2].step * lanes};
  const auto sum = find_sum_row<Number>(block.size[2], loops);
  auto* to = static_cast<Element*>(result) + width.result_of(block.begin[2]) * channels + block.channel;
  for (std::int64_t d = 0; d < block.size[0]; ++d) {
    const cpu::Range planes = depth.taps_inside(block.begin[0] + d);
    for (std::int64_t h = 0; h < block.size[1]; ++h) {
      const cpu::Range rows = height.taps_inside(block.begin[1] + h);
      loops.planes.count = planes.size(), loops.rows.count = rows.size();
      const std::int64_t results[] = {d, h, 0}, taps[] = {planes.begin, rows.begin, 0};
      sum(sources + box.position_of(results, taps) * lanes,
          weights + planes.begin * plane_weights + rows.begin * row_weights, loops, block.size[2], start, row_sums);
      const std::int64_t row =
          depth.result_of(block.begin[0] + d) * height.results + height.result_of(block.begin[1] + h);
      write_row(row_sums, block.size[2], block.channels, width.step * channels, to + row * width.results * channels);
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
void add_tap_products(const Number* grad, const Number* source, const ProductRows& product, Number* sums) {
  constexpr int lanes = VectorOf<Number>::lanes;
  Vector<Number> added[rows * columns] = {};
  for (std::int64_t row = 0; row < product.rows; ++row) {
    const Number *g = grad + row * product.grad_row, *from = source + row * product.source_row;
    for (std::int64_t column = 0; column < product.columns; ++column, from += product.source_column) {
      const Vector<Number> factor = load_vector(g + column * lanes);
      for (int r = 0; r < rows; ++r) {
        for (int k = 0; k < columns; ++k) {
          added[r * columns + k] += factor * load_vector(from + r * product.tap_row + k * product.tap_column);
        }
      }
    }
  }
  for (int r = 0; r < rows; ++r) {
    for (int k = 0; k < columns; ++k) {
      Number* sum = sums + r * product.sum_row + k * lanes;
      store_vector(sum, load_vector(sum) + added[r * columns + k]);
    }
  }
}

constexpr int most_product_columns = 7;

/// Returns the kernel rows whose sums, with a factor, fit into 16 registers.
constexpr int most_product_rows(int columns) { return columns < 4 ? 4 : 15 / columns; }

template <typename Number>
using AddTapProducts = void (*)(const Number*, const Number*, const ProductRows&, Number*);

template <typename Number, int columns>
AddTapProducts<Number> find_product_of_columns(int rows) {
  constexpr int most = most_product_rows(columns), two = most < 2 ? most : 2, three = most < 3 ? most : 3;
  constexpr AddTapProducts<Number> by_rows[] = {
      add_tap_products<Number, 1, columns>, add_tap_products<Number, two, columns>,
      add_tap_products<Number, three, columns>, add_tap_products<Number, most, columns>};
  return by_rows[rows - 1];
}

template <typename Number, int... columns>
AddTapProducts<Number> find_product(int count, int rows, std::integer_sequence<int, columns...>) {
  constexpr AddTapProducts<Number> (*by_columns[])(int) = {find_product_of_columns<Number, columns + 1>...};
  return by_columns[count - 1](rows);
}

constexpr std::int64_t most_terms = 256;  // of a sum in a register: few, for the sake of accuracy

/// Adds to `added`, `[kernel..., lanes]`, a block's gradient of some taps of the height and of the width, of all
/// planes. Sources and gradients, `[D, H, W, lanes]`, are packed.
template <typename Number>
void add_taps(const cpu::DepthwiseCorrelation& correlation, const cpu::DepthwiseBlock& block, const PackedBox& box,
              const Number* sources, const Number* grads, cpu::Range row_taps, cpu::Range column_taps, Number* added) {
  constexpr int lanes = VectorOf<Number>::lanes;
  const auto& [depth, height, width] = correlation.axes;
  const std::int64_t row_size = box.axes[2].positions() * lanes, grad_row = block.size[2] * lanes;
  const std::int64_t rows_at_once = block.size[2] < most_terms ? most_terms / block.size[2] : 1;
  const auto inside = [&](int a, cpu::Range taps) {
    return correlation.axes[a].results_inside(block.begin[a], block.size[a], taps.begin, taps.size());
  };
  const auto add = find_product<Number>(static_cast<int>(column_taps.size()), static_cast<int>(row_taps.size()),
                                        std::make_integer_sequence<int, most_product_columns>());
  const cpu::Range across = inside(2, column_taps), down = inside(1, row_taps);
  for (std::int64_t plane = 0; plane < depth.taps; ++plane) {
    const cpu::Range deep = inside(0, {plane, plane + 1});
    for (std::int64_t d = deep.begin; d < deep.end; ++d) {
      for (std::int64_t h = down.begin; h < down.end; h += rows_at_once) {
        const std::int64_t left = down.end - h;
        const ProductRows product{.rows = left < rows_at_once ? left : rows_at_once,
                                  .columns = across.size(),
                                  .grad_row = grad_row,
                                  .source_row = box.axes[1].step * row_size,
                                  .source_column = box.axes[2].step * lanes,
                                  .tap_row = box.axes[1].tap_step * row_size,
                                  .tap_column = box.axes[2].tap_step * lanes,
                                  .sum_row = width.taps * lanes};
        const std::int64_t results[] = {d, h, across.begin}, taps[] = {plane, row_taps.begin, column_taps.begin};
        add(grads + (d * block.size[1] + h) * grad_row + across.begin * lanes,
            sources + box.position_of(results, taps) * lanes, product,
            added + ((plane * height.taps + row_taps.begin) * width.taps + column_taps.begin) * lanes);
      }
    }
  }
}

/// Adds gradients, `[positions, lanes]`, to a register of sums: four sums at a time, so that one addition need not wait
/// for the one before.
template <typename Number>
void add_bias_gradient(const Number* grads, std::int64_t positions, Number* added) {
  constexpr int lanes = VectorOf<Number>::lanes;
  for (std::int64_t begin = 0; begin < positions; begin += 4 * most_terms) {
    const std::int64_t end = positions - begin < 4 * most_terms ? positions : begin + 4 * most_terms;
    Vector<Number> sum[4] = {};
    std::int64_t i = begin;
    for (; i + 4 <= end; i += 4) {
      for (int t = 0; t < 4; ++t) sum[t] += load_vector(grads + (i + t) * lanes);
    }
    for (; i < end; ++i) sum[0] += load_vector(grads + i * lanes);
    store_vector(added, load_vector(added) + ((sum[0] + sum[1]) + (sum[2] + sum[3])));
  }
}

template <typename Element>
void add_weight_gradient(const cpu::DepthwiseCorrelation& correlation, const cpu::DepthwiseBlock& block,
                         const void* source, const void* grad, void* sums, void* scratch) {
  using Number = Real<Element>;
  constexpr int lanes = VectorOf<Number>::lanes;
  const auto& [depth, height, width] = correlation.axes;
  const std::int64_t taps = kernel_size(correlation);
  const cpu::TapAxis grad_axes[] = {cpu::plain_axis(depth.results), cpu::plain_axis(height.results),
                                    cpu::plain_axis(width.results)};
  const PackedBox box(correlation.axes, block), grad_box(grad_axes, block);

  auto* sources = static_cast<Number*>(scratch);
  Number* grads = sources + box.positions() * lanes;
  Number* added = grads + grad_box.positions() * lanes;
  pack_box(static_cast<const Element*>(source), correlation.source_channels,
           Lanes<Element>(block, correlation.repeats, 1, 0), box, block.begin, sources);
  pack_box(static_cast<const Element*>(grad), correlation.result_channels, Lanes<Element>(block, 1, 1, 0), grad_box,
           block.begin, grads);
  for (std::int64_t tap = 0; tap <= taps; ++tap) store_vector(added + tap * lanes, Vector<Number>{});

  const std::int64_t chunks = (width.taps + most_product_columns - 1) / most_product_columns;
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    const cpu::Range columns{width.taps * chunk / chunks, width.taps * (chunk + 1) / chunks};
    const std::int64_t most_rows = most_product_rows(static_cast<int>(columns.size()));
    for (std::int64_t row = 0; row < height.taps; row += most_rows) {
      const std::int64_t end = height.taps - row < most_rows ? height.taps : row + most_rows;
      add_taps(correlation, block, box, sources, grads, {row, end}, columns, added);
    }
  }
  add_bias_gradient(grads, grad_box.positions(), added + taps * lanes);
  auto* total = static_cast<Number*>(sums);
  for (std::int64_t k = 0; k < (taps + 1) * lanes; k += lanes)
    store_vector(total + k, load_vector(total + k) + load_vector(added + k));
}

template <typename Element>
constexpr cpu::DepthwiseKernels make_depthwise_kernels() {
  using Number = Real<Element>;
  return {VectorOf<Number>::lanes, depthwise_scratch_size<Number>, correlate<Element>, add_weight_gradient<Element>};
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
