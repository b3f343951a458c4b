// The filter transpose by itself, against its definition: every byte in its place, and no other byte read or written.
// Driven by test_cpp.py, also with sanitizers. Prints "ok".
//
//   filter_transpose [step]  takes every step-th number of columns only; which ones differs from row to row
#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>  // no-ops where the address sanitizer is off
#else
#define ASAN_POISON_MEMORY_REGION(begin, bytes) static_cast<void>(begin)
#define ASAN_UNPOISON_MEMORY_REGION(begin, bytes) static_cast<void>(begin)
#endif
#include <torch_nhwc/filter_transpose.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

namespace {

using Index = std::int64_t;

/// An element of any size, at any address: filters are moved as bytes.
template <int size>
struct Bytes {
  unsigned char bytes[size];
};

void check(bool condition, const char* what, int size, int width, Index filters, Index rows, Index columns) {
  if (condition) return;
  std::fprintf(stderr, "failed: %s, elements of %d bytes, registers of %d, %lld x %lld x %lld\n", what, size, width,
               static_cast<long long>(filters), static_cast<long long>(rows), static_cast<long long>(columns));
  std::exit(1);
}

/// Bytes that begin `offset` bytes after the begin of a cache line, between guards. The address sanitizer sees every
/// access to the guards; the guards show writes that it misses (non-temporal stores), or writes without it.
class Guarded {
 public:
  Guarded(Index bytes, Index offset) : lines_((bytes + offset) / line + 3), begin_(line + offset), bytes_(bytes) {
    std::memset(lines_.data(), mark, static_cast<std::size_t>(size()));
    ASAN_POISON_MEMORY_REGION(first(), begin_);
    ASAN_POISON_MEMORY_REGION(first() + begin_ + bytes_, size() - begin_ - bytes_);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  ~Guarded() { ASAN_UNPOISON_MEMORY_REGION(first(), size()); }

  template <typename Element = unsigned char>
  Element* data() {
    return reinterpret_cast<Element*>(first() + begin_);
  }

  void fill(std::mt19937_64& random) {
    for (Index i = 0; i < bytes_; i += 8) {
      const std::uint64_t value = random();
      std::memcpy(data() + i, &value, static_cast<std::size_t>(std::min<Index>(8, bytes_ - i)));
    }
  }
  bool equals(Guarded& other) { return std::memcmp(data(), other.data(), static_cast<std::size_t>(bytes_)) == 0; }

  /// Whether the guards are what they were. They are open to all from then on.
  bool intact() {
    ASAN_UNPOISON_MEMORY_REGION(first(), size());
    const auto is_marked = [](unsigned char byte) { return byte == mark; };
    return std::all_of(first(), first() + begin_, is_marked) &&
           std::all_of(first() + begin_ + bytes_, first() + size(), is_marked);
  }

 private:
  static constexpr unsigned char mark = 0xA5;
  static constexpr Index line = 64;
  struct alignas(line) Line {
    unsigned char bytes[line];
  };
  unsigned char* first() { return reinterpret_cast<unsigned char*>(lines_.data()); }
  Index size() const { return static_cast<Index>(lines_.size()) * line; }

  std::vector<Line> lines_;
  Index begin_, bytes_;
};

/// The register widths that an element goes through. Plain loops do not care for the width.
template <int size, typename Check>
void for_each_width(const Check& check) {
  check(std::integral_constant<int, NHWC_REGISTER_BYTES>{});
  if constexpr (NHWC_REGISTER_BYTES > 32 && nhwc::detail::is_shuffled(size)) check(std::integral_constant<int, 32>{});
  if constexpr (NHWC_REGISTER_BYTES > 16 && nhwc::detail::is_shuffled(size)) check(std::integral_constant<int, 16>{});
}

template <int size>
void transposes(Index filters, Index rows, Index columns) {
  using Element = Bytes<size>;
  static std::mt19937_64 random;
  const Index bytes = filters * rows * columns * size;
  Guarded source(bytes, 1), original(bytes, 0), expected(bytes, 0);
  source.fill(random);
  std::memcpy(original.data(), source.data(), static_cast<std::size_t>(bytes));

  const Element* from = original.data<Element>();
  Element* to = expected.data<Element>();
  for (Index filter = 0; filter < filters; ++filter) {
    for (Index row = 0; row < rows; ++row) {
      for (Index column = 0; column < columns; ++column) {
        to[(filter * columns + column) * rows + row] = from[(filter * rows + row) * columns + column];
      }
    }
  }

  for_each_width<size>([&](auto width_constant) {
    constexpr int width = decltype(width_constant)::value;
    const auto check_here = [&](bool condition, const char* what) {
      check(condition, what, size, width, filters, rows, columns);
    };
    Guarded destination(bytes, 3), streamed(bytes, 0), in_place(bytes, 5), scratch(rows * columns * size, 7);
    std::memcpy(in_place.data(), original.data(), static_cast<std::size_t>(bytes));

    nhwc::filter_transpose<Element, width>(source.data<Element>(), destination.data<Element>(), filters, rows, columns);
    check_here(destination.equals(expected), "values");
    check_here(destination.intact(), "guards");

    nhwc::filter_transpose<Element, width>(source.data<Element>(), streamed.data<Element>(), filters, rows, columns,
                                           nhwc::Stores::non_temporal);
    check_here(streamed.equals(expected), "values by non-temporal stores");
    check_here(streamed.intact(), "guards by non-temporal stores");
    check_here(source.equals(original), "source");

    nhwc::filter_transpose_in_place<Element, width>(in_place.data<Element>(), scratch.data<Element>(), filters, rows,
                                                    columns);
    check_here(in_place.equals(expected), "values in place");
    check_here(in_place.intact() && scratch.intact(), "guards in place");
  });
  check(source.intact(), "guards of the source", size, 0, filters, rows, columns);
}

template <int size>
void transposes_both_ways(Index filters, Index rows, Index columns) {
  transposes<size>(filters, rows, columns);
  transposes<size>(filters, columns, rows);
}

template <int size>
void all_shapes(Index step) {
  for (Index rows = 0; rows <= 40; ++rows) {
    for (Index columns = rows % step; columns <= 64; columns += step) {
      for (const Index filters : {0, 1, 3}) transposes_both_ways<size>(filters, rows, columns);
      // Filters shorter than a register go many at a time: two buffers full, and a rest.
      const Index bytes = rows * columns * size;
      if (rows >= 2 && columns >= 2 && std::max(rows, columns) * size < 64) {
        transposes_both_ways<size>(2 * (nhwc::detail::buffer_bytes / bytes) + 1 + (rows + columns) % 3, rows, columns);
      }
    }
    for (const Index columns : {125, 343}) transposes_both_ways<size>(2, rows, columns);
  }
  // Lines that are a multiple, or nearly so, of a cache way apart push each other out; what then happens is in parts.
  for (const Index rows : {63, 64, 65, 129, 512, 1024, 1025, 2048, 2050, 4096}) {
    for (Index columns = 2 + rows % step; columns <= 27; columns += step) {
      transposes_both_ways<size>(columns == 9 ? 3 : 1, rows, columns);
    }
    for (const Index columns : {28, 33, 64}) transposes_both_ways<size>(1, rows, columns);
  }
  transposes_both_ways<size>(1, 129, 343);
  transposes_both_ways<size>(1, 343, 512);
}

}  // namespace

int main(int count, char** arguments) {
  const Index step = count > 1 ? std::atoi(arguments[1]) : 1;
  all_shapes<1>(step);
  all_shapes<2>(step);
  all_shapes<3>(step);  // no network: neither a power of two
  all_shapes<4>(step);
  all_shapes<8>(step);
  all_shapes<16>(step);
  all_shapes<32>(step);  // nor small enough
  std::puts("ok");
}
