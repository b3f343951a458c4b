// The plan for a GPU: from a list of weights to kernel launches, as few as one for a whole model.
//
// A tile is what one block of threads moves through its shared memory, about 16 KB. Weights are cut into tiles by
// bytes, and the tiles of all weights that the same kernel moves are one launch: each weight knows the number of its
// first block, and a block finds its weight by a binary search. The list travels as the kernel's argument, by value, so
// that nothing is allocated or copied for it, and a CUDA graph can record the launch.
//
// Needs C++17 and no other library, CUDA's included; tile.h has what a block does with its tile.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "torch_nhwc/version.h"

#if defined(__CUDACC__)
#define NHWC_HOST_DEVICE __host__ __device__
#else
#define NHWC_HOST_DEVICE
#endif

namespace nhwc {
namespace cuda {

/// What happens to the elements on the way: they are moved, by their size in bytes, or cast.
enum class Elements : std::uint8_t {
  bytes1,
  bytes2,
  bytes4,
  bytes8,
  bytes16,
  float_to_bfloat16,
  float_to_half,
  bfloat16_to_float,
  half_to_float,
};
constexpr int kinds_of_elements = 9;

NHWC_HOST_DEVICE constexpr unsigned source_bytes(Elements elements) {
  constexpr unsigned bytes[] = {1, 2, 4, 8, 16, 4, 4, 2, 2};
  return bytes[static_cast<int>(elements)];
}
NHWC_HOST_DEVICE constexpr unsigned destination_bytes(Elements elements) {
  constexpr unsigned bytes[] = {1, 2, 4, 8, 16, 2, 2, 4, 4};
  return bytes[static_cast<int>(elements)];
}

/// `filters` consecutive row-major matrices of `rows` x `columns` that become `columns` x `rows`. From contiguous to
/// channels-last the rows are the channels and the columns the taps; back it is the other way round. With one row or
/// column the elements keep their order. Where `source` equals `destination` each filter is permuted in its own bytes;
/// else the two must not overlap. Pointers are aligned to their elements.
struct Weight {
  const void* source;
  void* destination;
  std::int64_t filters, rows, columns;
  Elements elements;
};

/// What one kernel's arguments may take: anywhere, and from CUDA 12.1, its drivers and sm_70 on.
constexpr unsigned small_argument_bytes = 4 << 10, large_argument_bytes = (32 << 10) - 4;

/// The shared memory that every device gives a block without being asked.
constexpr unsigned plain_shared_bytes = 48 << 10;

/// What the device and its driver allow.
struct Limits {
  unsigned shared_bytes = plain_shared_bytes;  ///< of one block, after opting in; at least 48 KB
  unsigned argument_bytes = small_argument_bytes;
  unsigned processors = 1;  ///< blocks that work on long filters in place, each with a scratch of its own
};

constexpr unsigned threads_of_a_block = 256;

/// The way that a block goes about its tile.
///
/// The first two move whole bundles. A bundle is so many neighbouring lines of a filter that they fill 16 bytes across:
/// 4 channels of a float32 weight, with all of their taps. Seen from the one side a bundle is consecutive bytes, seen
/// from the other 16 bytes of every line. A run of bundles is linear on the one side, over any number of filters, and
/// on the other made of long pieces, so both are read and written by 16 bytes.
enum class Way : std::uint8_t {
  gather,     ///< bundles of rows: in linearly, out by pieces, collected from shared memory
  scatter,    ///< bundles of columns: in by pieces, which are scattered to shared memory, out linearly
  filters,    ///< whole filters, linear on both sides: lines of any length
  rectangle,  ///< a part of one filter, element by element: what nothing else serves
  copy,       ///< the elements keep their order
};

/// A weight, or a part of one, in the list of a launch.
struct Filters {
  const char* source;
  char* destination;
  std::uint32_t first_block;  ///< or, among long filters, the number of its first filter
  std::uint32_t count;        ///< bundles, filters, or for a copy elements
  std::uint32_t rows, columns;
  std::uint32_t per_block;  ///< of the count; of a rectangle, its rows
  std::uint16_t width;      ///< of a rectangle, its columns
  Way way;
};

template <unsigned capacity_>
struct FilterList {
  static constexpr unsigned capacity = capacity_;
  std::uint32_t size;
  Filters filters[capacity];
};

/// Beside the filters a kernel takes their number and, for long ones, the scratch and its size.
constexpr unsigned capacity_of(unsigned argument_bytes) { return (argument_bytes - 24) / sizeof(Filters); }

/// The weight that a block works on: the last that begins at it or before it.
NHWC_HOST_DEVICE inline const Filters& filters_of_block(const Filters* filters, std::uint32_t size,
                                                        std::uint32_t block) {
  std::uint32_t first = 0;
  for (std::uint32_t end = size; end - first > 1;) {
    const std::uint32_t middle = (first + end) / 2;
    (filters[middle].first_block <= block ? first : end) = middle;
  }
  return filters[first];
}

/// One kernel to launch.
struct Launch {
  Elements elements;
  std::vector<Filters> filters;
  std::uint32_t blocks;
  std::uint32_t shared_bytes;   ///< of a block
  std::uint64_t scratch_bytes;  ///< of a block, in global memory, for filters that no shared memory holds; else 0
};

/// How lines lie in a tile: the `n`-th has `length` elements of `element_bytes`, and all follow one another, but for
/// one unit (a word, or an element where that is longer) that is left free after so many bundles that the banks would
/// repeat. Then threads that each take an element at one place of consecutive bundles meet different banks, whatever
/// the length: with `length * 16` bytes from bundle to bundle, banks repeat after 8 / gcd(length, 8) of them.
struct TileLayout {
  std::uint32_t length, element_bytes;
  std::uint32_t shift;  ///< log2 of the bundles between two gaps

  NHWC_HOST_DEVICE TileLayout(std::uint32_t length_, std::uint32_t element_bytes_)
      : length(length_),
        element_bytes(element_bytes_),
        shift(length_ % 8 == 0   ? 0
              : length_ % 4 == 0 ? 1
              : length_ % 2 == 0 ? 2
                                 : 3) {}

  NHWC_HOST_DEVICE std::uint32_t unit_bytes() const { return element_bytes < 4 ? 4 : element_bytes; }
  NHWC_HOST_DEVICE std::uint32_t lines_of_a_bundle() const { return 16 / element_bytes; }
  /// The chunks of 16 bytes between two gaps: a multiple of 8.
  NHWC_HOST_DEVICE std::uint32_t chunks_between_gaps() const { return length << shift; }

  /// The offset of the first line of a bundle.
  NHWC_HOST_DEVICE std::uint32_t bundle(std::uint32_t index) const {
    return index * length * 16 + (index >> shift) * unit_bytes();
  }
  NHWC_HOST_DEVICE std::uint32_t line(std::uint32_t index) const {
    return index * length * element_bytes + ((index / lines_of_a_bundle()) >> shift) * unit_bytes();
  }
  std::uint64_t bytes(std::uint64_t lines) const {
    return lines * length * element_bytes + ((lines / lines_of_a_bundle()) >> shift) * unit_bytes() + unit_bytes();
  }
};

namespace detail {

constexpr unsigned tile_bytes = 16 << 10;  // what a tile should hold: four vectors for every thread

inline std::uint64_t divide_up(std::uint64_t a, std::uint64_t b) { return (a + b - 1) / b; }

inline std::uint64_t power_of_two_up_to(std::uint64_t limit) {
  std::uint64_t power = 1;
  while (power * 2 <= limit) power *= 2;
  return power;
}

// A weight in tiles of one way. Without any, the way cannot serve it.
struct Cut {
  Way way = Way::copy;
  std::uint64_t tiles = 0;
  std::uint64_t count = 0;
  std::uint64_t per_block = 0, width = 0;
  std::uint64_t shared_bytes = 0;
};

// What a weight's tiles may be: parts of filters, or whole filters, as a permutation in place needs them.
class Cutter {
 public:
  Cutter(const Weight& weight, const Limits& limits)
      : filters_(weight.filters),
        rows_(weight.rows),
        columns_(weight.columns),
        size_(rows_ * columns_),
        from_bytes_(source_bytes(weight.elements)),
        to_bytes_(destination_bytes(weight.elements)),
        is_aligned_(
            (reinterpret_cast<std::uintptr_t>(weight.source) | reinterpret_cast<std::uintptr_t>(weight.destination)) %
                16 ==
            0),
        shared_bytes_(limits.shared_bytes) {}

  Cut copy() const {
    const std::uint64_t per_block = tile_bytes / std::max(from_bytes_, to_bytes_);
    return {Way::copy, divide_up(filters_ * size_, per_block), filters_ * size_, per_block, 0, 0};
  }

  // A side of whole sectors is bundled before any other, and then the longer one, for the longer pieces.
  Cut bundles(bool whole_filters) const {
    const bool rows_first = rows_ >= columns_;
    for (const unsigned aligned_to : {32, 16}) {
      for (const bool rows : {rows_first, !rows_first}) {
        const Cut cut = bundles_of(rows, aligned_to, whole_filters);
        if (cut.tiles != 0) return cut;
      }
    }
    return {};
  }

  // So many filters that every tile begins aligned.
  Cut filters(bool is_in_place) const {
    const std::uint64_t narrow = size_ * std::min(from_bytes_, to_bytes_);
    const std::uint64_t step = narrow % 16 == 0 ? 1 : 16 / (narrow & (~narrow + 1));  // of the lowest bit that is set
    const std::uint64_t wide = size_ * std::max(from_bytes_, to_bytes_);
    const std::uint64_t per_block = step * std::max<std::uint64_t>(1, tile_bytes / (wide * step));
    if (!is_aligned_ || per_block * wide > shared_bytes_) return {};
    const std::uint64_t shared_bytes = TileLayout(columns_, to_bytes_).bytes(per_block * rows_);
    if (shared_bytes > (is_in_place ? shared_bytes_ : plain_shared_bytes)) return {};
    return {Way::filters, divide_up(filters_, per_block), filters_, per_block, 0, shared_bytes};
  }

  Cut rectangles(bool whole_filters) const {
    std::uint64_t height = rows_, width = columns_;
    if (!whole_filters) {
      // Both sides as long as a warp where they can be; the rest goes to the height.
      const std::uint64_t elements = tile_bytes / to_bytes_;
      width = std::min(width, std::max<std::uint64_t>(32, elements / std::min<std::uint64_t>(height, 128)));
      height = std::min(height, elements / width);
    }
    const std::uint64_t shared_bytes = height * (width | 1) * to_bytes_;
    if (shared_bytes > shared_bytes_ || width > 0xFFFF) return {};
    const std::uint64_t of_a_filter = divide_up(rows_, height) * divide_up(columns_, width);
    return {Way::rectangle, filters_ * of_a_filter, filters_, height, width, shared_bytes};
  }

 private:
  // Bundles want lines of whole sectors of 32 bytes; in long lines it does not matter that sectors are shared. With a
  // cast that makes the linear side narrower, two bundles are 16 bytes of it, and so are always together.
  Cut bundles_of(bool rows, unsigned aligned_to, bool whole_filters) const {
    const std::uint64_t bytes = rows ? to_bytes_ : from_bytes_;
    const std::uint64_t across = (rows ? rows_ : columns_) * bytes, length = rows ? columns_ : rows_;
    const bool may_share = across >= 512 && from_bytes_ == to_bytes_;
    if (!is_aligned_ || across % aligned_to != 0 || (aligned_to < 32 && !may_share)) return {};
    if (2 * 16 * length > shared_bytes_) return {};
    const std::uint64_t of_a_filter = across / 16;
    std::uint64_t per_block = 0;
    if (whole_filters) {
      per_block = of_a_filter * std::max<std::uint64_t>(1, tile_bytes / (size_ * bytes));
    } else {
      // Eight bundles side by side write whole cache lines, and meet no bank twice.
      const std::uint64_t wide = std::max(from_bytes_, to_bytes_) / bytes;  // how much more the linear side may be
      const std::uint64_t wanted = std::max<std::uint64_t>(8, tile_bytes / (16 * length * wide));
      const std::uint64_t most = std::min<std::uint64_t>(threads_of_a_block, plain_shared_bytes / (16 * length + 16));
      per_block = power_of_two_up_to(std::min(wanted, most));
      if (most < 2) return {};
    }
    const TileLayout layout(length, bytes);
    const std::uint64_t shared_bytes = layout.bytes(per_block * layout.lines_of_a_bundle());
    if (shared_bytes > shared_bytes_) return {};
    const std::uint64_t count = filters_ * of_a_filter;
    return {rows ? Way::gather : Way::scatter, divide_up(count, per_block), count, per_block, 0, shared_bytes};
  }

  std::uint64_t filters_, rows_, columns_, size_, from_bytes_, to_bytes_;
  bool is_aligned_;
  std::uint64_t shared_bytes_;
};

// The launches, while they fill.
class Planner {
 public:
  explicit Planner(const Limits& limits) : limits_(limits), capacity_(capacity_of(limits.argument_bytes)) {}

  void add(Weight weight) {
    const bool keeps_order = weight.rows == 1 || weight.columns == 1;
    const bool is_in_place = weight.source == weight.destination;
    if (weight.filters * weight.rows * weight.columns == 0 || (keeps_order && is_in_place)) return;
    if (keeps_order)
      weight = {weight.source,  weight.destination, weight.filters * weight.rows * weight.columns, 1, 1,
                weight.elements};
    // Counts of blocks and of what they share out are kept well below 2^32.
    const std::int64_t size = weight.rows * weight.columns;
    const std::int64_t filters_of_a_part = std::max<std::int64_t>(1, (std::int64_t{1} << 30) / size);
    for (std::int64_t first = 0; first < weight.filters; first += filters_of_a_part) {
      const auto* source = static_cast<const char*>(weight.source) + first * size * source_bytes(weight.elements);
      auto* destination = static_cast<char*>(weight.destination) + first * size * destination_bytes(weight.elements);
      const std::int64_t filters = std::min(filters_of_a_part, weight.filters - first);
      add_part({source, destination, filters, weight.rows, weight.columns, weight.elements}, is_in_place);
    }
  }

  std::vector<Launch> launches() && {
    // So far long filters have a block each: these have turns.
    for (Launch& launch : launches_) {
      if (launch.scratch_bytes != 0) launch.blocks = std::min(launch.blocks, limits_.processors);
    }
    return std::move(launches_);
  }

 private:
  void add_part(const Weight& part, bool is_in_place) {
    const Cutter cutter(part, limits_);
    if (part.rows == 1) return add(part, cutter.copy());
    Cut cut = cutter.bundles(is_in_place);
    if (cut.tiles == 0) cut = cutter.filters(is_in_place);
    if (cut.tiles == 0) cut = cutter.rectangles(is_in_place);
    if (cut.tiles != 0) return add(part, cut);
    // A filter that is too long to be permuted in shared memory: by way of a copy of it.
    const std::uint64_t size = part.rows * part.columns * source_bytes(part.elements);
    const std::uint64_t scratch_bytes = divide_up(size, 256) * 256;
    cut = cutter.bundles(false);
    if (cut.tiles == 0) cut = cutter.rectangles(false);
    cut.count = part.filters;
    cut.tiles = part.filters;
    add(part, cut, scratch_bytes);
  }

  void add(const Weight& part, const Cut& cut, std::uint64_t scratch_bytes = 0) {
    Launch& launch = launch_for(part.elements, cut, scratch_bytes);
    launch.filters.push_back({static_cast<const char*>(part.source), static_cast<char*>(part.destination),
                              launch.blocks, static_cast<std::uint32_t>(cut.count),
                              static_cast<std::uint32_t>(part.rows), static_cast<std::uint32_t>(part.columns),
                              static_cast<std::uint32_t>(cut.per_block), static_cast<std::uint16_t>(cut.width),
                              cut.way});
    launch.blocks += static_cast<std::uint32_t>(cut.tiles);
    launch.shared_bytes = std::max(launch.shared_bytes, static_cast<std::uint32_t>(cut.shared_bytes));
    launch.scratch_bytes = std::max(launch.scratch_bytes, scratch_bytes);
  }

  // Blocks with much shared memory leave room for few others, so they are kept apart.
  Launch& launch_for(Elements elements, const Cut& cut, std::uint64_t scratch_bytes) {
    const auto is_large = [](std::uint64_t shared_bytes) { return shared_bytes > plain_shared_bytes; };
    for (Launch& launch : launches_) {
      if (launch.elements == elements && (launch.scratch_bytes != 0) == (scratch_bytes != 0) &&
          is_large(launch.shared_bytes) == is_large(cut.shared_bytes) && launch.filters.size() < capacity_ &&
          launch.blocks + cut.tiles < std::uint64_t{1} << 31) {
        return launch;
      }
    }
    launches_.push_back({elements, {}, 0, 0, 0});
    return launches_.back();
  }

  Limits limits_;
  std::size_t capacity_;
  std::vector<Launch> launches_;
};

}  // namespace detail

/// Whether the plan can take a weight: pointers aligned to their elements, filters below 2^31 elements, and no cast in
/// place. Empty weights may have null pointers.
inline bool can_plan(const Weight& weight) {
  const bool is_small = weight.rows == 0 || weight.columns <= ((std::int64_t{1} << 31) - 1) / weight.rows;
  const bool is_in_place = weight.source == weight.destination && weight.source != nullptr;
  return (is_small || weight.rows == 1 || weight.columns == 1) &&
         !(is_in_place && weight.elements > Elements::bytes16) &&
         reinterpret_cast<std::uintptr_t>(weight.source) % source_bytes(weight.elements) == 0 &&
         reinterpret_cast<std::uintptr_t>(weight.destination) % destination_bytes(weight.elements) == 0;
}

/// The launches that convert the weights, all of which `can_plan`. None where nothing moves.
inline std::vector<Launch> plan_launches(const std::vector<Weight>& weights, const Limits& limits = {}) {
  detail::Planner planner(limits);
  for (const Weight& weight : weights) planner.add(weight);
  return std::move(planner).launches();
}

}  // namespace cuda
}  // namespace nhwc
