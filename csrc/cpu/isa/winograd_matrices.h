// The matrices of Winograd's minimal filtering F(m, r): m neighbouring results under r taps by m + r - 1 products in
// the place of m * r. The names are those of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks"
// (2015),
//
//   results = AT [(G weight) * (BT input)]
//
// where `*` multiplies point by point. Cook and Toom construct them: the results of a correlation are the transpose of
// a product of polynomials, which m + r - 1 of its values determine. The points are where these values are taken, the
// last one at infinity.
//
// Includes nothing: it is data, made at compile time, and shared by all instruction sets.
#pragma once

namespace nhwc::cpu {

template <int row_count, int column_count>
struct Matrix {
  static constexpr int rows = row_count, columns = column_count;
  double at[row_count][column_count];

  constexpr Matrix<column_count, row_count> transposed() const {
    Matrix<column_count, row_count> other{};
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < columns; ++j) other.at[j][i] = at[i][j];
    }
    return other;
  }
};

/// Small numbers keep rounding errors small, and multiplications by them are free or cheap.
constexpr double winograd_points[] = {0, 1, -1, 2, -2};

template <int m, int r>
struct WinogradMatrices {
  static constexpr int n = m + r - 1, finite = n - 1;
  static_assert(finite <= static_cast<int>(sizeof(winograd_points) / sizeof(*winograd_points)));

  Matrix<m, n> AT{};
  Matrix<n, r> G{};
  Matrix<n, n> BT{};

  constexpr WinogradMatrices() {
    for (int point = 0; point < n; ++point) {
      // Of a finite point, the product of (x - x') over all other points; at infinity, over all points.
      double factors[n] = {1}, scale = 1;
      int degree = 0;
      for (int other = 0; other < finite; ++other) {
        if (other == point) continue;
        for (int k = ++degree; k >= 0; --k) {
          factors[k] = (k > 0 ? factors[k - 1] : 0) - (k < degree ? winograd_points[other] * factors[k] : 0);
        }
        if (point < finite) scale *= winograd_points[point] - winograd_points[other];
      }
      for (int k = 0; k < m; ++k) AT.at[k][point] = point < finite ? power(winograd_points[point], k) : k == m - 1;
      for (int k = 0; k < r; ++k) {
        G.at[point][k] = point < finite ? power(winograd_points[point], k) / scale : k == r - 1;
      }
      for (int k = 0; k < n; ++k) BT.at[point][k] = factors[k];
      begin_positive(point);
    }
  }

 private:
  static constexpr double power(double base, int exponent) {
    double result = 1;
    for (int k = 0; k < exponent; ++k) result *= base;
    return result;
  }

  /// A sum whose first term is negative takes one more instruction. The sign of a point is free.
  constexpr void begin_positive(int point) {
    int first = 0;
    while (BT.at[point][first] == 0) ++first;
    if (BT.at[point][first] > 0) return;
    for (double& each : BT.at[point]) each = each == 0 ? 0 : -each;
    for (double& each : G.at[point]) each = each == 0 ? 0 : -each;
  }
};

}  // namespace nhwc::cpu
