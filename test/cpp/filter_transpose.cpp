// The filter transpose by itself: every value where it belongs, and not a byte beside the destination. Built with the
// sanitizers by test_cpp.py. Prints "ok".
#include <torch_nhwc/filter_transpose.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

struct Element16 {
  std::uint64_t halves[2];
  bool operator==(const Element16& other) const { return halves[0] == other.halves[0] && halves[1] == other.halves[1]; }
};

template <typename Element>
Element element(std::int64_t index) {
  return static_cast<Element>(index * 2654435761 + 12345);
}
template <>
Element16 element<Element16>(std::int64_t index) {
  return {{static_cast<std::uint64_t>(index), ~static_cast<std::uint64_t>(index)}};
}

void check(bool condition, const char* what, std::int64_t rows, std::int64_t columns) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s, %lld x %lld\n", what, static_cast<long long>(rows),
               static_cast<long long>(columns));
  std::exit(1);
}

// Guards of a few elements, of odd number, lie before and behind every buffer.
template <typename Element>
struct Guarded {
  static constexpr std::int64_t guard = 5;
  std::vector<Element> elements;
  std::int64_t count;

  explicit Guarded(std::int64_t count) : elements(count + 2 * guard, element<Element>(-7)), count(count) {}
  Element* data() { return elements.data() + guard; }
  bool intact() const {
    for (std::int64_t i = 0; i < guard; ++i) {
      if (!(elements[i] == element<Element>(-7)) || !(elements[guard + count + i] == element<Element>(-7)))
        return false;
    }
    return true;
  }
};

template <typename Element>
void transposes(std::int64_t filters, std::int64_t rows, std::int64_t columns) {
  const std::int64_t count = filters * rows * columns;
  Guarded<Element> source(count), destination(count), in_place(count), scratch(rows * columns);
  for (std::int64_t i = 0; i < count; ++i) source.data()[i] = in_place.data()[i] = element<Element>(i);
  nhwc::filter_transpose(source.data(), destination.data(), filters, rows, columns);
  nhwc::filter_transpose_in_place(in_place.data(), scratch.data(), filters, rows, columns);
  for (std::int64_t f = 0; f < filters; ++f) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) {
        const auto expected = element<Element>((f * rows + r) * columns + c);
        const auto index = (f * columns + c) * rows + r;
        check(destination.data()[index] == expected, "value", rows, columns);
        check(in_place.data()[index] == expected, "value in place", rows, columns);
      }
    }
  }
  check(destination.intact() && in_place.intact() && scratch.intact() && source.intact(), "guards", rows, columns);
}

void casts() {
  const std::vector<float> source = {0.5f, -1.25f, 3.0f, 4.0f, 5.5f, -6.0f};
  std::vector<double> destination(6);
  nhwc::filter_transpose(source.data(), destination.data(), 1, 2, 3);
  check(destination == std::vector<double>({0.5, 4.0, -1.25, 5.5, 3.0, -6.0}), "cast", 2, 3);
  std::vector<int> scaled(6);
  nhwc::filter_transpose(source.data(), scaled.data(), 1, 1, 6,
                         [](float value) { return static_cast<int>(value * 4); });
  check(scaled == std::vector<int>({2, -5, 12, 16, 22, -24}), "cast of the caller's own", 1, 6);
}

template <typename Element>
void all_shapes() {
  for (const std::int64_t filters : {0, 1, 3}) {
    for (std::int64_t rows = 0; rows <= 40; ++rows) {
      for (const std::int64_t columns : {0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 25, 27, 31, 49, 64, 125}) {
        transposes<Element>(filters, rows, columns);
        transposes<Element>(filters, columns, rows);
      }
    }
  }
  for (const std::int64_t rows : {63, 64, 65, 129, 512}) transposes<Element>(2, rows, 9);
}

}  // namespace

int main() {
  all_shapes<std::uint8_t>();
  all_shapes<std::uint16_t>();
  all_shapes<std::uint32_t>();
  all_shapes<std::uint64_t>();
  all_shapes<Element16>();
  casts();
  std::puts("ok");
}
