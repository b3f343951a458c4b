// Winograd's minimal filtering for one instruction set: transforms along one axis at a time, on registers of channels,
// and the product of each point.
#pragma once

#include "cpu/isa/vectors.h"
#include "cpu/isa/winograd_matrices.h"
#include "cpu/winograd_kernels.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

using cpu::WinogradBox;
using cpu::WinogradPoints;
using cpu::WinogradTile;

// --- The transforms ---

template <int m>
constexpr cpu::WinogradMatrices<m, 3> of_three_taps{};

/// What is transformed, and by which matrix: of F(2, 3) and of F(4, 3).
struct InputToPoints {
  template <int m>
  static constexpr auto matrix = of_three_taps<m>.BT;
};
struct WeightToPoints {
  template <int m>
  static constexpr auto matrix = of_three_taps<m>.G;
};
struct GradientToPoints {
  template <int m>
  static constexpr auto matrix = of_three_taps<m>.AT.transposed();
};
struct PointsToResults {
  template <int m>
  static constexpr auto matrix = of_three_taps<m>.AT;
};
struct PointsToWeight {
  template <int m>
  static constexpr auto matrix = of_three_taps<m>.G.transposed();
};

/// Returns a row of the matrix times `in`, from a column on, added to the sum if there is one.
template <const auto& matrix, int row, int column, bool has_sum>
NHWC_ALWAYS_INLINE Vector<float> sum_of_terms(const Vector<float>* in, Vector<float> sum) {
  if constexpr (column == matrix.columns) {
    return sum;
  } else {
    constexpr auto factor = static_cast<float>(matrix.at[row][column]);
    if constexpr (factor == 0) return sum_of_terms<matrix, row, column + 1, has_sum>(in, sum);
    if constexpr (factor == 1) sum = has_sum ? sum + in[column] : in[column];
    if constexpr (factor == -1) sum = has_sum ? sum - in[column] : -in[column];
    if constexpr (factor != 0 && factor != 1 && factor != -1) {
      sum = has_sum ? sum + factor * in[column] : factor * in[column];
    }
    if constexpr (factor != 0) return sum_of_terms<matrix, row, column + 1, true>(in, sum);
  }
}

/// An array of registers of channels, and the steps along its three axes.
template <typename Element>
struct Registers {
  Element* first;
  std::int64_t step[3];
};

template <typename Element>
Registers<Element> registers_at(Element* first, const std::int64_t* step) {
  return {first, {step[0], step[1], step[2]}};
}

template <const auto& matrix, int... row>
NHWC_ALWAYS_INLINE void multiply(const Vector<float>* in, Vector<float>* out, std::integer_sequence<int, row...>) {
  ((out[row] = sum_of_terms<matrix, row, 0, false>(in, Vector<float>{})), ...);
}

/// out = matrix * in
template <const auto& matrix>
NHWC_ALWAYS_INLINE void multiply(const Vector<float>* in, Vector<float>* out) {
  multiply<matrix>(in, out, std::make_integer_sequence<int, matrix.rows>{});
}

/// Transforms along one axis, for all positions of the two others. Arrays are passed by value: a store of numbers may
/// change what a reference refers to, and all steps would be read again.
template <const auto& matrix, typename From, typename To>
void transform_axis(int axis, const std::int64_t* sizes, Registers<const From> from, Registers<To> to) {
  const int outer = axis == 0 ? 1 : 0, inner = axis == 2 ? 1 : 2;
  const std::int64_t outer_size = sizes[outer], inner_size = sizes[inner], from_step = from.step[axis],
                     to_step = to.step[axis], from_inner = from.step[inner], to_inner = to.step[inner];
  for (std::int64_t i = 0; i < outer_size; ++i) {
    const From* source = from.first + i * from.step[outer];
    To* destination = to.first + i * to.step[outer];
    for (std::int64_t j = 0; j < inner_size; ++j, source += from_inner, destination += to_inner) {
      Vector<float> in[matrix.columns], out[matrix.rows];
      NHWC_UNROLL
      for (int k = 0; k < matrix.columns; ++k) in[k] = load_vector(source + k * from_step);
      multiply<matrix>(in, out);
      NHWC_UNROLL
      for (int k = 0; k < matrix.rows; ++k) store_vector(destination + k * to_step, out[k]);
    }
  }
}

/// Transforms along height and width at once, in registers, for all depths.
template <const auto& of_height, const auto& of_width, typename From, typename To>
void transform_plane(std::int64_t depths, Registers<const From> from, Registers<To> to) {
  const From* source = from.first;
  To* destination = to.first;
  for (std::int64_t i = 0; i < depths; ++i, source += from.step[0], destination += to.step[0]) {
    Vector<float> half[of_width.rows][of_height.columns];  // along the width
    NHWC_UNROLL
    for (int h = 0; h < of_height.columns; ++h) {
      Vector<float> in[of_width.columns], out[of_width.rows];
      NHWC_UNROLL
      for (int w = 0; w < of_width.columns; ++w) in[w] = load_vector(source + h * from.step[1] + w * from.step[2]);
      multiply<of_width>(in, out);
      NHWC_UNROLL
      for (int w = 0; w < of_width.rows; ++w) half[w][h] = out[w];
    }
    NHWC_UNROLL
    for (int w = 0; w < of_width.rows; ++w) {
      Vector<float> out[of_height.rows];
      multiply<of_height>(half[w], out);
      NHWC_UNROLL
      for (int h = 0; h < of_height.rows; ++h) store_vector(destination + h * to.step[1] + w * to.step[2], out[h]);
    }
  }
}

/// What is transformed at once: one axis, or the plane.
enum Stage { depth, height, width, plane };

inline int find_stages(const WinogradTile& tile, bool is_depth_last, Stage* stages) {
  const bool has_depth = tile.results[0] > 1, has_height = tile.results[1] > 1, has_width = tile.results[2] > 1;
  int count = 0;
  if (has_depth && !is_depth_last) stages[count++] = depth;
  if (has_height && has_width && tile.results[1] == 2) {
    stages[count++] = plane;
  } else {
    if (has_height) stages[count++] = height;
    if (has_width) stages[count++] = width;
  }
  if (has_depth && is_depth_last) stages[count++] = depth;
  return count;
}

template <typename Transform, typename From, typename To>
void transform(const WinogradTile& tile, Stage stage, const std::int64_t* sizes, const Registers<const From>& from,
               const Registers<To>& to) {
  static constexpr auto &of_two = Transform::template matrix<2>, &of_four = Transform::template matrix<4>;
  if (stage == plane) {
    (tile.results[2] == 2 ? transform_plane<of_two, of_two, From, To>
                          : transform_plane<of_two, of_four, From, To>)(sizes[0], from, to);
  } else {
    (tile.results[stage] == 2 ? transform_axis<of_two, From, To> : transform_axis<of_four, From, To>)(stage, sizes,
                                                                                                      from, to);
  }
}

/// The sizes before and after a transform along an axis.
template <typename Transform>
std::int64_t size_before(std::int64_t results) {
  if (results == 1) return 1;
  return results == 2 ? Transform::template matrix<2>.columns : Transform::template matrix<4>.columns;
}
template <typename Transform>
std::int64_t size_after(std::int64_t results) {
  if (results == 1) return 1;
  return results == 2 ? Transform::template matrix<2>.rows : Transform::template matrix<4>.rows;
}

constexpr int most_points = 6 * 6 * 6;

/// Room for the points of a tile, of one register of channels.
struct Room {
  static constexpr int lanes = VectorOf<float>::lanes;
  alignas(64) float numbers[most_points * lanes];

  template <typename Element = float>
  Registers<Element> as_array(const std::int64_t* sizes) {
    return {reinterpret_cast<Element*>(numbers), {sizes[1] * sizes[2] * lanes, sizes[2] * lanes, lanes}};
  }
};

/// Transforms one register of channels along all axes under three taps. The plane comes where there are fewer depths.
template <typename Transform, typename From, typename To>
void transform_all(const WinogradTile& tile, const Registers<const From>& from, const Registers<To>& to) {
  constexpr bool is_depth_last = Transform::template matrix<2>.rows >= Transform::template matrix<2>.columns;
  Stage stages[3];
  const int count = find_stages(tile, is_depth_last, stages);
  std::int64_t sizes[3];
  for (int axis = 0; axis < 3; ++axis) sizes[axis] = size_before<Transform>(tile.results[axis]);
  Room rooms[2];
  Registers<float> current{};
  for (int k = 0; k < count; ++k) {
    std::int64_t after[3] = {sizes[0], sizes[1], sizes[2]};
    for (int axis = 0; axis < 3; ++axis) {
      const bool is_transformed = stages[k] == plane ? axis > 0 : axis == static_cast<int>(stages[k]);
      if (is_transformed) after[axis] = size_after<Transform>(tile.results[axis]);
    }
    const Registers<float> room = rooms[k % 2].as_array(after);
    const auto before = registers_at<const float>(current.first, current.step);
    if (count == 1) {
      transform<Transform>(tile, stages[k], sizes, from, to);
    } else if (k == 0) {
      transform<Transform>(tile, stages[k], sizes, from, room);
    } else if (k == count - 1) {
      transform<Transform>(tile, stages[k], sizes, before, to);
    } else {
      transform<Transform>(tile, stages[k], sizes, before, room);
    }
    current = room;
    for (int axis = 0; axis < 3; ++axis) sizes[axis] = after[axis];
  }
}

/// Calls `work(inside, at)` for the elements of a box and their place in a dense copy of it.
template <typename Element, typename Work>
NHWC_ALWAYS_INLINE void for_each_inside(const WinogradBox& box, const std::int64_t* sizes, const Work& work) {
  constexpr std::int64_t lanes = VectorOf<float>::lanes;
  auto* first = static_cast<Element*>(const_cast<void*>(box.first));
  for (std::int64_t d = box.inside[0].begin; d < box.inside[0].end; ++d) {
    for (std::int64_t h = box.inside[1].begin; h < box.inside[1].end; ++h) {
      for (std::int64_t w = box.inside[2].begin; w < box.inside[2].end; ++w) {
        work(first + d * box.step[0] + h * box.step[1] + w * box.step[2], ((d * sizes[1] + h) * sizes[2] + w) * lanes);
      }
    }
  }
}

inline bool is_whole(const WinogradBox& box, const std::int64_t* sizes) {
  for (int axis = 0; axis < 3; ++axis) {
    if (box.inside[axis].size() != sizes[axis]) return false;
  }
  return true;
}

inline Registers<float> registers_of(const WinogradTile& tile, const WinogradPoints& points, std::int64_t panel) {
  const std::int64_t step = points.point_step;
  return {points.first + panel * points.panel_step, {tile.side(1) * tile.side(2) * step, tile.side(2) * step, step}};
}

template <typename Transform, typename Element>
void to_points(const WinogradTile& tile, const WinogradBox& from, const WinogradPoints& to) {
  constexpr std::int64_t lanes = VectorOf<float>::lanes;
  std::int64_t sizes[3];
  for (int axis = 0; axis < 3; ++axis) sizes[axis] = size_before<Transform>(tile.results[axis]);
  const bool has_all = is_whole(from, sizes);
  for (std::int64_t c = 0, panel = 0; c < from.channels; c += lanes, ++panel) {
    auto source = registers_at(static_cast<const Element*>(from.first) + c, from.step);
    Room room;
    if (!has_all || c + lanes > from.channels) {
      const std::int64_t count = c + lanes > from.channels ? from.channels - c : lanes;
      const Registers<Element> copy = room.as_array<Element>(sizes);
      std::memset(copy.first, 0, static_cast<std::size_t>(sizes[0] * sizes[1] * sizes[2] * lanes) * sizeof(Element));
      for_each_inside<const Element>(from, sizes, [&](const Element* inside, std::int64_t at) {
        if (count == lanes) {
          std::memcpy(copy.first + at, inside + c, lanes * sizeof(Element));
        } else {
          for (std::int64_t k = 0; k < count; ++k) copy.first[at + k] = inside[c + k];
        }
      });
      source = registers_at<const Element>(copy.first, copy.step);
    }
    transform_all<Transform>(tile, source, registers_of(tile, to, panel));
  }
}

template <typename Transform, typename Element>
void from_points(const WinogradTile& tile, const WinogradPoints& from, const WinogradBox& to) {
  constexpr std::int64_t lanes = VectorOf<float>::lanes;
  std::int64_t sizes[3];
  for (int axis = 0; axis < 3; ++axis) sizes[axis] = size_after<Transform>(tile.results[axis]);
  const bool has_all = is_whole(to, sizes);
  for (std::int64_t c = 0, panel = 0; c < to.channels; c += lanes, ++panel) {
    const Registers<float> points = registers_of(tile, from, panel);
    const auto source = registers_at<const float>(points.first, points.step);
    if (has_all && c + lanes <= to.channels) {
      auto* first = static_cast<Element*>(const_cast<void*>(to.first)) + c;
      transform_all<Transform>(tile, source, registers_at(first, to.step));
      continue;
    }
    Room room;
    const Registers<Element> copy = room.as_array<Element>(sizes);
    transform_all<Transform>(tile, source, copy);
    const std::int64_t count = c + lanes > to.channels ? to.channels - c : lanes;
    for_each_inside<Element>(to, sizes, [&](Element* inside, std::int64_t at) {
      for (std::int64_t k = 0; k < count; ++k) inside[c + k] = copy.first[at + k];
    });
  }
}

// --- The products ---

// A tile of sums fills most of the registers.
#if NHWC_X86_LEVEL >= 3 || defined(__ARM_NEON)
constexpr int product_rows = 12;  // of 32 registers
#elif NHWC_X86_LEVEL == 2
constexpr int product_rows = 6;  // of 16
#else
constexpr int product_rows = 4;  // of 16, some of which have the products
#endif

template <int rows, int panels>
[[gnu::noinline]] void multiply_rows(const cpu::WinogradProduct& product, const float* first, const float* b,
                                     float* c) {
  constexpr int lanes = VectorOf<float>::lanes;
  // An address is a register and one, two or no steps: a register for each row would be too many.
  constexpr int rows_of_register = 3, registers = (rows + rows_of_register - 1) / rows_of_register;
  const std::int64_t row_step = product.a_row_step, depth_step = product.a_depth_step,
                     b_panel_step = product.b_panel_step, c_panel_step = product.c_panel_step;
  const float* a[registers];
  NHWC_UNROLL
  for (int r = 0; r < registers; ++r) a[r] = first + r * rows_of_register * row_step;
  Vector<float> sums[rows][panels] = {};
  for (std::int64_t k = 0; k < product.depth; ++k, b += lanes) {
    Vector<float> numbers[panels];
    NHWC_UNROLL
    for (int j = 0; j < panels; ++j) numbers[j] = load_vector(b + j * b_panel_step);
    NHWC_UNROLL
    for (int i = 0; i < rows; ++i) {
      const float number = a[i / rows_of_register][i % rows_of_register * row_step];
      NHWC_UNROLL
      for (int j = 0; j < panels; ++j) sums[i][j] += number * numbers[j];
    }
    NHWC_UNROLL
    for (int r = 0; r < registers; ++r) a[r] += depth_step;
  }
  NHWC_UNROLL
  for (int i = 0; i < rows; ++i) {
    NHWC_UNROLL
    for (int j = 0; j < panels; ++j) {
      float* to = c + j * c_panel_step + i * lanes;
      store_vector(to, product.adds ? load_vector(to) + sums[i][j] : sums[i][j]);
    }
  }
}

template <int panels>
void multiply_panels(const cpu::WinogradProduct& product, const float* b, float* c) {
  constexpr int lanes = VectorOf<float>::lanes, some = product_rows * 2 / 3, few = product_rows / 3;
  const float* a = product.a;
  std::int64_t row = 0;
  const auto advance = [&](int rows) { row += rows, a += rows * product.a_row_step, c += rows * lanes; };
  for (; row + product_rows <= product.rows; advance(product_rows)) {
    multiply_rows<product_rows, panels>(product, a, b, c);
  }
  for (; row + some <= product.rows; advance(some)) multiply_rows<some, panels>(product, a, b, c);
  for (; row + few <= product.rows; advance(few)) multiply_rows<few, panels>(product, a, b, c);
  for (; row < product.rows; advance(1)) multiply_rows<1, panels>(product, a, b, c);
}

/// Sums of many terms are sums of shorter ones, which is more exact, and for which fewer rows of b stay in the cache.
inline void multiply_points(const cpu::WinogradProduct& product) {
  for (std::int64_t first = 0; first < product.depth; first += product.terms) {
    cpu::WinogradProduct part = product;
    const std::int64_t left = product.depth - first;
    part.depth = left < product.terms ? left : product.terms;
    part.a += first * product.a_depth_step;
    part.adds = product.adds || first > 0;
    const float* b = product.b + first * VectorOf<float>::lanes;
    float* c = product.c;
    std::int64_t panel = 0;
    for (; panel + 2 <= product.panels; panel += 2, b += 2 * product.b_panel_step, c += 2 * product.c_panel_step) {
      multiply_panels<2>(part, b, c);
    }
    if (panel < product.panels) multiply_panels<1>(part, b, c);
  }
}

template <typename Element>
constexpr cpu::WinogradKernels make_winograd_kernels() {
  if constexpr (std::is_same_v<Element, double>) {
    return {};
  } else {
    return {.lanes = VectorOf<float>::lanes,
            .rows_at_once = product_rows,
            .input_to_points = to_points<InputToPoints, Element>,
            .gradient_to_points = to_points<GradientToPoints, Element>,
            .weight_to_points = to_points<WeightToPoints, Element>,
            .points_to_results = from_points<PointsToResults, Element>,
            .points_to_weight = from_points<PointsToWeight, Element>,
            .multiply = multiply_points};
  }
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
