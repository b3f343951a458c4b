// The casts, by themselves and within the filter transpose, against the definition of the floating-point formats.
// Driven by test_cpp.py, also with sanitizers. Prints "ok".
#include <torch_nhwc/casts.h>
#include <torch_nhwc/filter_transpose.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <vector>

namespace {

using Index = std::int64_t;

void check(bool condition, const char* what, Index filters, Index rows, Index columns) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s, %lld x %lld x %lld\n", what, static_cast<long long>(filters),
               static_cast<long long>(rows), static_cast<long long>(columns));
  std::exit(1);
}

/// A binary interchange format of 16 bits, as IEEE 754 defines them, in exact arithmetic of doubles.
struct Format {
  int exponent_bits, fraction_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }

  double value(std::uint16_t bits) const {
    const int fraction = bits & ((1 << fraction_bits) - 1), exponents = (1 << exponent_bits) - 1;
    const int exponent = bits >> fraction_bits & exponents;
    double magnitude = 0;
    if (exponent == exponents) {
      magnitude = fraction == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
    } else if (exponent == 0) {
      magnitude = std::ldexp(fraction, 1 - bias() - fraction_bits);
    } else {
      magnitude = std::ldexp((1 << fraction_bits) + fraction, exponent - bias() - fraction_bits);
    }
    return bits >> 15 != 0 ? -magnitude : magnitude;
  }

  /// The value of the format that is nearest, the even one of two.
  double nearest(double value) const {
    if (!std::isfinite(value) || value == 0) return value;
    const int exponent = std::max(std::ilogb(value), 1 - bias());
    const double unit = std::ldexp(1, exponent - fraction_bits);
    const double rounded = std::nearbyint(value / unit) * unit;
    const double largest = std::ldexp(2 - std::ldexp(1, -fraction_bits), bias());
    return std::abs(rounded) > largest ? std::copysign(std::numeric_limits<double>::infinity(), value) : rounded;
  }
};

constexpr Format bfloat16{8, 7}, half{5, 10};

/// The same number, signs of zeros included; or not a number, either.
bool is_same(double a, double b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

/// Inputs and what they must become: `value` gives the number that a result stands for.
template <typename From, typename To>
struct Cases {
  std::vector<From> inputs;
  std::vector<double> expected;
  double (*value)(To);

  bool is_expected(Index input, To result) const { return is_same(value(result), expected[input]); }
  Index size() const { return static_cast<Index>(inputs.size()); }
};

/// One by one, and many at a time in runs of all lengths, which is what a filter transpose of one row does.
template <typename From, typename To, typename Cast>
void casts_alone(const Cases<From, To>& cases, const Cast& cast) {
  for (Index i = 0; i < cases.size(); ++i) check(cases.is_expected(i, cast(cases.inputs[i])), "one cast", 1, 1, i);
  Index length = 0;
  for (Index begin = 0; begin < cases.size(); begin += length) {
    length = std::min(length % 1200 + 1, cases.size() - begin);
    std::vector<To> results(length);
    nhwc::filter_transpose(cases.inputs.data() + begin, results.data(), 1, 1, length, cast);
    for (Index i = 0; i < length; ++i) check(cases.is_expected(begin + i, results[i]), "run of casts", 1, length, i);
  }
}

/// Within a transpose, by both kinds of stores. Takes its inputs from `first` on.
template <typename From, typename To, typename Cast>
void casts_transposed(const Cases<From, To>& cases, const Cast& cast, Index first, Index filters, Index rows,
                      Index columns) {
  constexpr std::size_t line = 64;
  const Index count = filters * rows * columns;
  first %= cases.size() - count;
  // A copy of the exact size, beyond which the address sanitizer watches.
  const std::vector<From> source(cases.inputs.begin() + first, cases.inputs.begin() + first + count);
  std::vector<To> cached(count), room(count + line / sizeof(To));
  void* aligned = room.data();
  std::size_t bytes = room.size() * sizeof(To);
  To* streamed = static_cast<To*>(std::align(line, count * sizeof(To), aligned, bytes));
  nhwc::filter_transpose(source.data(), cached.data(), filters, rows, columns, cast);
  nhwc::filter_transpose(source.data(), streamed, filters, rows, columns, cast, nhwc::Stores::non_temporal);
  for (Index filter = 0; filter < filters; ++filter) {
    for (Index row = 0; row < rows; ++row) {
      for (Index column = 0; column < columns; ++column) {
        const Index from = first + (filter * rows + row) * columns + column;
        const Index to = (filter * columns + column) * rows + row;
        check(cases.is_expected(from, cached[to]), "cast", filters, rows, columns);
        check(cases.is_expected(from, streamed[to]), "cast with non-temporal stores", filters, rows, columns);
      }
    }
  }
}

template <typename From, typename To, typename Cast>
void casts_in_all_shapes(const Cases<From, To>& cases, const Cast& cast) {
  Index first = 0;
  const auto both_ways = [&](Index filters, Index rows, Index columns) {
    casts_transposed(cases, cast, first += 7919, filters, rows, columns);
    casts_transposed(cases, cast, first += 7919, filters, columns, rows);
  };
  for (Index rows = 1; rows <= 36; ++rows) {
    for (Index columns = rows; columns <= 36; ++columns) both_ways(2, rows, columns);
  }
  for (const Index columns : {2, 3, 9, 16, 25, 27, 28, 49}) {
    for (const Index rows : {63, 64, 128, 512, 1024, 1025}) both_ways(1, rows, columns);  // strips, parts and squares
  }
  for (const Index columns : {2, 3, 5, 9}) both_ways(400, 3, columns);  // together, several buffers full
}

/// In the order given, where neighbors are of one kind, and in random order, where all kinds meet.
template <typename From, typename To, typename Cast>
void casts(std::vector<From> inputs, double (*expected)(From), double (*value)(To), const Cast& cast) {
  Cases<From, To> cases{std::move(inputs), {}, value};
  const auto expect = [&] {
    cases.expected.clear();
    for (const From& input : cases.inputs) cases.expected.push_back(expected(input));
  };
  expect();
  casts_alone(cases, cast);
  std::shuffle(cases.inputs.begin(), cases.inputs.end(), std::mt19937{});
  expect();
  casts_alone(cases, cast);
  casts_in_all_shapes(cases, cast);
}

/// Floats of every upper half, with lower halves around every place where rounding turns, and any others.
std::vector<float> all_kinds_of_floats() {
  std::mt19937 random;
  std::vector<float> floats;
  for (std::uint32_t upper = 0; upper < 1 << 16; ++upper) {
    for (const std::uint32_t lower : {0x0000u, 0x0001u, 0x0FFFu, 0x1000u, 0x1001u, 0x2000u, 0x3000u, 0x7FFFu, 0x8000u,
                                      0x8001u, 0xFFFFu, static_cast<std::uint32_t>(random() & 0xFFFF)}) {
      floats.push_back(nhwc::detail::bits_as<float>(upper << 16 | lower));
    }
  }
  return floats;
}

std::vector<std::uint16_t> all_bits() {
  std::vector<std::uint16_t> bits(1 << 16);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint16_t>(i);
  return bits;
}

void the_callers_own_casts() {
  const std::vector<float> source = {0.5f, -1.25f, 3.0f, 4.0f, 5.5f, -6.0f};
  std::vector<double> destination(6);
  nhwc::filter_transpose(source.data(), destination.data(), 1, 2, 3);
  check(destination == std::vector<double>({0.5, 4.0, -1.25, 5.5, 3.0, -6.0}), "the language's own cast", 1, 2, 3);

  const auto scale = [](float value) { return static_cast<std::int32_t>(value * 4); };
  std::vector<std::int32_t> scaled(6);
  nhwc::filter_transpose(source.data(), scaled.data(), 1, 1, 6, scale);
  check(scaled == std::vector<std::int32_t>({2, -5, 12, 16, 22, -24}), "the caller's own cast", 1, 1, 6);
}

// Casts to elements of a quarter and an eighth of the size, in shapes that would overrun buffers made for a half.
template <typename From>
void casts_to_bytes() {
  const auto cast = [](From value) { return static_cast<std::uint8_t>(value); };
  for (const auto& [rows, columns] : {std::pair{24, 49}, {49, 24}, {20, 60}, {27, 512}, {512, 27}, {3, 9}, {70, 70}}) {
    const int filters = 8, size = rows * columns;
    std::vector<From> source(filters * size);
    for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<From>(i % 251);
    std::vector<std::uint8_t> destination(source.size());
    nhwc::filter_transpose(source.data(), destination.data(), filters, rows, columns, cast);
    for (int i = 0; i < filters * size; ++i) {
      const int filter = i / size, column = i % size / rows, row = i % rows;
      check(destination[i] == cast(source[filter * size + row * columns + column]), "to bytes", filters, rows, columns);
    }
  }
}

}  // namespace

int main() {
  const auto float_value = [](float value) -> double { return value; };
  const auto bfloat16_value = [](std::uint16_t bits) { return bfloat16.value(bits); };
  const auto half_value = [](std::uint16_t bits) { return half.value(bits); };
  const auto nearest_bfloat16 = [](float value) { return bfloat16.nearest(value); };
  const auto nearest_half = [](float value) { return half.nearest(value); };
  casts<float, std::uint16_t>(all_kinds_of_floats(), nearest_bfloat16, bfloat16_value, nhwc::FloatToBFloat16{});
  casts<float, std::uint16_t>(all_kinds_of_floats(), nearest_half, half_value, nhwc::FloatToHalf{});
  casts<std::uint16_t, float>(all_bits(), bfloat16_value, float_value, nhwc::BFloat16ToFloat{});
  casts<std::uint16_t, float>(all_bits(), half_value, float_value, nhwc::HalfToFloat{});
  the_callers_own_casts();
  casts_to_bytes<float>();
  casts_to_bytes<double>();
  std::puts("ok");
}
