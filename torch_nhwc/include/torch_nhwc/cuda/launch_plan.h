// Plans kernel launches for a list of weights, as few as one for a whole model.
//
// Needs C++17 and no other library, CUDA's included. launch.h has the launch, tile.h the work of a block.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "torch_nhwc/cuda/launch.h"

namespace nhwc {
namespace cuda {
namespace detail {

constexpr unsigned tile_bytes = 16 << 10;  // what a tile should hold: four vectors for every thread

inline std::uint64_t divide_up(std::uint64_t a, std::uint64_t b) { return (a + b - 1) / b; }

inline std::uint64_t power_of_two_up_to(std::uint64_t limit) {
  std::uint64_t power = 1;
  while (power * 2 <= limit) power *= 2;
  return power;
}

// A weight in tiles of one way; without tiles, the way cannot serve it.
struct Cut {
  Way way = Way::copy;
  std::uint64_t tiles = 0;
  std::uint64_t count = 0;
  std::uint64_t per_block = 0, width = 0;
  std::uint64_t shared_bytes = 0;
};

// Cuts a weight into tiles: parts of filters, or whole filters for a permutation in place.
class Cutter {
 public:
  Cutter(const Weight& weight, const Limits& limits) : weight_(weight), shared_bytes_(limits.shared_bytes) {}

  Cut copy() const {
    const std::uint64_t per_block = tile_bytes / std::max(from_bytes_, to_bytes_);
    return {Way::copy, divide_up(filters_ * size_, per_block), filters_ * size_, per_block, 0, 0};
  }

  // A side of whole sectors is preferred for bundles, then the longer side, for longer pieces.
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

  // As many filters as make every tile begin aligned.
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
      // Both sides are as long as a warp if possible; the rest goes to the height.
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
  // Lines of bundles should be whole sectors of 32 bytes; in long lines shared sectors do not matter. If a cast makes
  // the linear side narrower, two bundles are 16 bytes of it, and always go together.
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
      // Eight neighbouring bundles write whole cache lines, without a bank conflict.
      const std::uint64_t wide = std::max(from_bytes_, to_bytes_) / bytes;  // how much more the linear side may be
      const std::uint64_t bundles = std::max<std::uint64_t>(8, tile_bytes / (16 * length * wide));
      const std::uint64_t most = std::min<std::uint64_t>(threads_of_a_block, plain_shared_bytes / (16 * length + 16));
      per_block = power_of_two_up_to(std::min(bundles, most));
      if (most < 2) return {};
    }
    const TileLayout layout(length, bytes);
    const std::uint64_t shared_bytes = layout.bytes(per_block * layout.lines_of_a_bundle());
    if (shared_bytes > shared_bytes_) return {};
    const std::uint64_t count = filters_ * of_a_filter;
    return {rows ? Way::gather : Way::scatter, divide_up(count, per_block), count, per_block, 0, shared_bytes};
  }

  const Weight& weight_;
  std::uint64_t shared_bytes_;
  std::uint64_t filters_ = weight_.filters, rows_ = weight_.rows, columns_ = weight_.columns, size_ = rows_ * columns_;
  std::uint64_t from_bytes_ = source_bytes(weight_.elements), to_bytes_ = destination_bytes(weight_.elements);
  bool is_aligned_ =
      ((reinterpret_cast<std::uintptr_t>(weight_.source) | reinterpret_cast<std::uintptr_t>(weight_.destination)) %
       16) == 0;
};

// The launches that are being filled.
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
    // Counts of blocks and of their work stay well below 2^32.
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
    // At this point each long filter has its own block: blocks take turns.
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
    // A filter that is too long to be permuted in shared memory goes through a copy.
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

  // Blocks with much shared memory leave room for few others, so they get their own launches.
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

/// Returns whether a weight can be planned: pointers aligned to their elements, filters below 2^31 elements, and no
/// cast in place. Empty weights may have null pointers.
inline bool can_plan(const Weight& weight) {
  const bool is_small = weight.rows == 0 || weight.columns <= ((std::int64_t{1} << 31) - 1) / weight.rows;
  const bool is_in_place = weight.source == weight.destination && weight.source != nullptr;
  return (is_small || weight.rows == 1 || weight.columns == 1) &&
         !(is_in_place && weight.elements > Elements::bytes16) &&
         reinterpret_cast<std::uintptr_t>(weight.source) % source_bytes(weight.elements) == 0 &&
         reinterpret_cast<std::uintptr_t>(weight.destination) % destination_bytes(weight.elements) == 0;
}

/// Returns the launches that convert the weights, all of which `can_plan`. There are none if nothing moves.
inline std::vector<Launch> plan_launches(const std::vector<Weight>& weights, const Limits& limits = {}) {
  detail::Planner planner(limits);
  for (const Weight& weight : weights) planner.add(weight);
  return std::move(planner).launches();
}

}  // namespace cuda
}  // namespace nhwc
