// Prints the matrices of Winograd's minimal filtering, row by row, exactly: name, results, taps, and the numbers.
// Driven by test_cpp.py, which proves them.
#include "cpu/isa/winograd_matrices.h"

#include <cstdio>

namespace {

template <int m, int r, typename Matrix>
void print(const char* name, const Matrix& matrix) {
  for (const auto& row : matrix.at) {
    std::printf("%s %d %d", name, m, r);
    for (const double number : row) std::printf(" %a", number);
    std::puts("");
  }
}

template <int m, int r>
void print_all() {
  constexpr nhwc::cpu::WinogradMatrices<m, r> matrices;
  print<m, r>("AT", matrices.AT);
  print<m, r>("G", matrices.G);
  print<m, r>("BT", matrices.BT);
}

}  // namespace

int main() {
  print_all<2, 3>();
  print_all<4, 3>();
  print_all<3, 2>();
  print_all<2, 5>();
}
