// Filters that no shared memory holds, permuted in place by way of global memory.
#pragma once

#include <cstdint>

#include "torch_nhwc/cuda/launch.h"

namespace nhwc {
namespace cuda {

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

}  // namespace cuda
}  // namespace nhwc
