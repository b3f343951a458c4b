// Convolutions with fewer multiplications (Winograd's minimal filtering), compiled for one instruction set. Uses
// neither torch nor code of the standard library, like filter_kernels.h. The matrices are in isa/winograd_matrices.h.
#pragma once

#include <cstdint>

#include "cpu/work/axes.h"

namespace nhwc::cpu {

/// How many neighbouring results a tile has along depth, height and width: 2 or 4 under three taps, 1 under one.
struct WinogradTile {
  std::int64_t results[3];
  std::int64_t terms = 32;  // of a sum, of which sums of more are: fewer are more exact

  std::int64_t taps(int axis) const { return results[axis] == 1 ? 1 : 3; }
  std::int64_t side(int axis) const { return results[axis] + taps(axis) - 1; }  // of its points
  std::int64_t points() const { return side(0) * side(1) * side(2); }

  /// Returns the point whose value all results of a tile contain once: of each axis that which stands for x = 1.
  std::int64_t common_point() const {
    std::int64_t point = 0;
    for (int axis = 0; axis < 3; ++axis) point = point * side(axis) + (results[axis] == 1 ? 0 : 1);
    return point;
  }
};

/// Positions of an array, each of so many neighbouring channels: `first` is the first position, in or outside of the
/// array, and those of `inside` are in it. Steps are in elements.
struct WinogradBox {
  const void* first;
  std::int64_t step[3];
  Range inside[3];
  std::int64_t channels;
};

/// The points of some tiles, in panels of a register of channels: `first` is that of a tile.
struct WinogradPoints {
  float* first;
  std::int64_t point_step, panel_step;
};

/// c = a * b for matrices in panels of a register, `[panels][rows][lanes]`: b has `depth` rows, and c the rows of a. If
/// `adds`, it is added to c. Sums have at most `terms`, and are added up.
struct WinogradProduct {
  const float* a;
  std::int64_t a_row_step, a_depth_step;
  const float* b;
  std::int64_t b_panel_step;
  float* c;
  std::int64_t c_panel_step;
  std::int64_t rows, depth, panels, terms;
  bool adds;
};

/// There are none for doubles.
struct WinogradKernels {
  using ToPoints = void (*)(const WinogradTile& tile, const WinogradBox& from, const WinogradPoints& to);
  using FromPoints = void (*)(const WinogradTile& tile, const WinogradPoints& from, const WinogradBox& to);

  std::int64_t lanes;         // floats of a register
  std::int64_t rows_at_once;  // of a product

  // What is outside of the array is zero; the lanes beyond the last channel become zero.
  ToPoints input_to_points;     // a tile of inputs, `side` positions along each axis
  ToPoints gradient_to_points;  // a tile of results' gradients
  ToPoints weight_to_points;    // the taps, all of which are inside of their box
  // What is outside of the array is not written.
  FromPoints points_to_results;
  FromPoints points_to_weight;  // the gradient of the taps

  void (*multiply)(const WinogradProduct& product);
};

}  // namespace nhwc::cpu
