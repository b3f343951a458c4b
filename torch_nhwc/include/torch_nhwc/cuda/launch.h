// A launch of the kernels on a GPU: its list of weights, and how they are cut and laid out in shared memory.
//
// A tile is what one block of threads moves through its shared memory, about 16 KB. Weights are cut into tiles by
// bytes, and the tiles of all weights that the same kernel moves are one launch: each weight knows the number of its
// first block, and a block finds its weight by a binary search. The list is the kernel's argument, by value, so that
// nothing is allocated or copied for it, and a CUDA graph can record the launch.
//
// Needs C++17 and no other library, CUDA's included.
#pragma once

#include <cstdint>
#include <vector>

#include "torch_nhwc/version.h"

#if defined(__CUDACC__)
#define NHWC_HOST_DEVICE __host__ __device__
#else
#define NHWC_HOST_DEVICE
#endif

namespace nhwc {
namespace cuda {

/// What happens to the elements: they are moved, by their size in bytes, or cast.
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
/// column the elements keep their order. If `source` equals `destination`, each filter is permuted in its own bytes;
/// otherwise the two must not overlap. Pointers are aligned to their elements.
struct Weight {
  const void* source;
  void* destination;
  std::int64_t filters, rows, columns;
  Elements elements;
};

/// The bytes that one kernel's arguments may have: everywhere, and with CUDA 12.1, its drivers and sm_70 or later.
constexpr unsigned small_argument_bytes = 4 << 10, large_argument_bytes = (32 << 10) - 4;

/// The shared memory of a block on every device without opting in.
constexpr unsigned plain_shared_bytes = 48 << 10;

/// The limits of the device and its driver.
struct Limits {
  unsigned shared_bytes = plain_shared_bytes;  ///< of one block, after opting in; at least 48 KB
  unsigned argument_bytes = small_argument_bytes;
  unsigned processors = 1;  ///< blocks that work on long filters in place, each with a scratch of its own
};

constexpr unsigned threads_of_a_block = 256;

/// How a block moves its tile.
///
/// The first two move whole bundles. A bundle is so many neighbouring lines of a filter that they fill 16 bytes across:
/// 4 channels of a float32 weight, with all of their taps. On one side a bundle is consecutive bytes, on the other it
/// is 16 bytes of every line. A run of bundles is linear on one side, over any number of filters, and consists of long
/// pieces on the other, so both are read and written by 16 bytes.
enum class Way : std::uint8_t {
  gather,     ///< bundles of rows: in linearly, out by pieces, collected from shared memory
  scatter,    ///< bundles of columns: in by pieces, which are scattered to shared memory, out linearly
  filters,    ///< whole filters, linear on both sides: lines of any length
  rectangle,  ///< a part of one filter, element by element, if nothing else serves
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

/// In addition to the filters a kernel takes their number and, for long ones, the scratch and its size.
constexpr unsigned capacity_of(unsigned argument_bytes) { return (argument_bytes - 24) / sizeof(Filters); }

/// Returns the weight that a block works on: the last one that begins at it or before it.
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
  std::uint64_t scratch_bytes;  ///< of a block, in global memory, for filters that no shared memory holds; otherwise 0
};

/// A filter that is too long for shared memory is permuted by one block, from a copy of it in global memory: `copy`,
/// a barrier, then `tiles` tiles of `transpose`, with a barrier after each phase. Blocks take turns at the filters of a
/// launch, of which there are `count`.
struct LongFilter {
  Filters copy, transpose;
  std::uint32_t tiles;

  NHWC_HOST_DEVICE static std::uint32_t count(const Filters* list, std::uint32_t size) {
    return list[size - 1].first_block + list[size - 1].count;
  }

  NHWC_HOST_DEVICE LongFilter(const Filters* list, std::uint32_t size_of_list, std::uint32_t number, Elements elements,
                              char* scratch)
      : copy(filters_of_block(list, size_of_list, number)), transpose(copy) {
    const Filters filters = copy;
    const std::uint32_t index = number - filters.first_block;
    const std::uint32_t bytes = source_bytes(elements), size = filters.rows * filters.columns;
    copy.source = transpose.destination = filters.destination + std::uint64_t{index} * size * bytes;
    copy.destination = scratch;
    copy.way = Way::copy;
    copy.count = copy.per_block = size;
    transpose.source = scratch;
    if (filters.way == Way::rectangle) {
      const std::uint32_t height = filters.per_block, width = filters.width;
      tiles = ((filters.rows + height - 1) / height) * ((filters.columns + width - 1) / width);
      transpose.count = 1;
    } else {
      transpose.count = (filters.way == Way::gather ? filters.rows : filters.columns) / (16 / bytes);
      tiles = (transpose.count + filters.per_block - 1) / filters.per_block;
    }
  }
};

/// The layout of lines in a tile: each has `length` elements of `element_bytes`, and they are consecutive, except that
/// one unit (a word, or an element if that is longer) is free after as many bundles as the banks would repeat. Then
/// threads that each read an element at one place of consecutive bundles use different banks, for any length: with
/// `length * 16` bytes from bundle to bundle, banks repeat after 8 / gcd(length, 8) of them.
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

  /// Returns the offset of the first line of a bundle.
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

}  // namespace cuda
}  // namespace nhwc
