// Proves the zip networks: for every register width, element size and number of columns, in both directions. What a
// shuffle does to one tile it does to all, so one tile whose bytes name their origin is a proof. Driven by
// test_cpp.py. Prints the number of proven networks, and "ok".
#include <torch_nhwc/cpu/matrix_transpose.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace {

int proven = 0;

// In memory, for the prover below; and out of the optimizer's sight, which might otherwise prove it by itself.
using Network = void (*)(unsigned char* tile);

/// Checks a network against the definition: element [row][column] of the tile becomes [column][row].
void prove(Network network, int width, int size, int rows, int columns) {
  const int bytes = rows * columns * size;
  std::vector<unsigned char> tile(bytes);
  // A byte cannot hold an index of up to 2048: it goes through in two halves.
  for (const int shift : {0, 8}) {
    for (int index = 0; index < bytes; ++index) tile[index] = static_cast<unsigned char>(index >> shift);
    network(tile.data());
    for (int row = 0; row < rows; ++row) {
      for (int column = 0; column < columns; ++column) {
        for (int byte = 0; byte < size; ++byte) {
          const int from = (row * columns + column) * size + byte, to = (column * rows + row) * size + byte;
          if (tile[to] == static_cast<unsigned char>(from >> shift)) continue;
          std::fprintf(stderr, "failed: registers of %d bytes, elements of %d, %d x %d, at [%d][%d]\n", width, size,
                       rows, columns, row, column);
          std::exit(1);
        }
      }
    }
  }
  ++proven;
}

#if NHWC_HAS_SHUFFLES

template <typename Register, int columns, bool back>
void network(unsigned char* bytes) {
  typename Register::Vector tile[columns];
  std::memcpy(tile, bytes, sizeof(tile));
  nhwc::transpose_tile<Register, columns, back>(tile);
  std::memcpy(bytes, tile, sizeof(tile));
}

template <int size, int width, int columns>
void prove_both_directions() {
  using Register = nhwc::Register<size, width>;
  prove(network<Register, columns, false>, width, size, Register::elements, columns);
  prove(network<Register, columns, true>, width, size, columns, Register::elements);
}

template <int size, int width, int... offset>
void prove_short_sides(std::integer_sequence<int, offset...>) {
  (prove_both_directions<size, width, offset + 2>(), ...);
}

template <int size, int width>
void prove_size() {
  if constexpr (nhwc::detail::is_shuffled(size) && width <= NHWC_REGISTER_BYTES) {
    constexpr int longest = nhwc::detail::longest_short_side, square = nhwc::Register<size, width>::elements;
    prove_short_sides<size, width>(std::make_integer_sequence<int, longest - 1>{});
    if constexpr (square < 2 || (square > longest && square <= 32)) prove_both_directions<size, width, square>();
  }
}

template <int width>
void prove_width() {
  prove_size<1, width>();
  prove_size<2, width>();
  prove_size<4, width>();
  prove_size<8, width>();
  prove_size<16, width>();
}

void prove_all() {
  prove_width<16>();
  prove_width<32>();
  prove_width<64>();
}

#else

void prove_all() {}

#endif

}  // namespace

int main() {
  prove_all();
  std::printf("%d networks proven\nok\n", proven);
}
