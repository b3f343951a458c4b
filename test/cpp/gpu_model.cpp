// A GPU without a GPU: runs planned launches on the CPU, thread by thread and phase by phase, and counts what a warp's
// accesses would cost (gpu_model.h). A shared library for the tests, with a C interface.
#include "gpu_model.h"

#include <torch_nhwc/cuda/launch_plan.h>
#include <torch_nhwc/cuda/tile.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

using namespace gpu_model;
using namespace nhwc::cuda;

namespace {

template <Elements elements>
void run_tile(const Filters& filters, std::uint32_t index, char* shared, std::uint64_t shared_bytes, Counts* counts) {
  const auto tile = [&](Trace* trace) {
    return Tile<elements, CountingAccess>(filters, index, shared, {trace, shared_bytes});
  };
  run_phase(threads_of_a_block, counts, [&](unsigned thread, Trace* trace) { tile(trace).load(thread); });
  run_phase(threads_of_a_block, counts, [&](unsigned thread, Trace* trace) { tile(trace).store(thread); });
}

template <Elements elements>
void run_block(const Launch& launch, std::uint32_t block, Counts* counts) {
  const Filters& filters = filters_of_block(launch.filters.data(), launch.filters.size(), block);
  const auto quads = std::make_unique<Quad[]>(launch.shared_bytes / 16 + 1);
  char* shared = reinterpret_cast<char*>(quads.get());
  std::memset(shared, 0xA5, launch.shared_bytes);
  const std::uint32_t index = block - filters.first_block;
  if (launch.scratch_bytes == 0) return run_tile<elements>(filters, index, shared, launch.shared_bytes, counts);
  const auto scratch = std::make_unique<Line[]>(launch.scratch_bytes / sizeof(Line));
  make_reachable(scratch.get(), launch.scratch_bytes);
  const std::uint32_t size = launch.filters.size(), end = LongFilter::count(launch.filters.data(), size);
  for (std::uint32_t filter = block; filter < end; filter += launch.blocks) {
    const LongFilter parts(launch.filters.data(), size, filter, elements, reinterpret_cast<char*>(scratch.get()));
    run_tile<elements>(parts.copy, 0, shared, launch.shared_bytes, counts);
    for (std::uint32_t tile = 0; tile < parts.tiles; ++tile) {
      run_tile<elements>(parts.transpose, tile, shared, launch.shared_bytes, counts);
    }
  }
}

using RunBlock = void (*)(const Launch&, std::uint32_t, Counts*);
constexpr RunBlock run_block_of[] = {
    run_block<Elements::bytes1>,        run_block<Elements::bytes2>,
    run_block<Elements::bytes4>,        run_block<Elements::bytes8>,
    run_block<Elements::bytes16>,       run_block<Elements::float_to_bfloat16>,
    run_block<Elements::float_to_half>, run_block<Elements::bfloat16_to_float>,
    run_block<Elements::half_to_float>,
};

void run_launch(const Launch& launch, unsigned seed, Counts* counts) {
  // An order that visits every block once: a step that has no divisor in common with the number of blocks.
  const std::uint64_t blocks = launch.blocks;
  std::uint64_t step = blocks / 2 + seed % 7 + 1;
  while (std::gcd(step, blocks) != 1) ++step;
  for (std::uint64_t block = 0; block < blocks; ++block) {
    run_block_of[static_cast<int>(launch.elements)](launch, block * step % blocks, counts);
  }
}

}  // namespace

extern "C" {

struct LaunchSummary {
  std::uint32_t elements, weights, blocks, shared_bytes;
  std::uint64_t scratch_bytes;
};

/// Plans the weights as for a GPU of these limits. Describes at most `room` launches, and at most `filters_room` of
/// their filters, one launch after the other. Returns the number of launches; -1 if a weight cannot be planned.
int plan_model(const Weight* weights, int number, const Limits* limits, LaunchSummary* summaries, int room,
               Filters* filters, int filters_room) {
  const std::vector<Weight> list(weights, weights + number);
  if (!std::all_of(list.begin(), list.end(), can_plan)) return -1;
  const std::vector<Launch> launches = plan_launches(list, *limits);
  for (const Launch& launch : launches) {
    if (room-- <= 0) break;
    *summaries++ = {static_cast<std::uint32_t>(launch.elements), static_cast<std::uint32_t>(launch.filters.size()),
                    launch.blocks, launch.shared_bytes, launch.scratch_bytes};
    for (const Filters& part : launch.filters) {
      if (filters_room-- > 0) *filters++ = part;
    }
  }
  return static_cast<int>(launches.size());
}

/// Converts the weights as a GPU of these limits would, in an order of blocks by `seed`. Adds to `counts`, which may be
/// null. Returns the number of launches; -1 if a weight cannot be planned.
int run_model(const Weight* weights, int number, const Limits* limits, unsigned seed, Counts* counts) {
  const std::vector<Weight> list(weights, weights + number);
  if (!std::all_of(list.begin(), list.end(), can_plan)) return -1;
  reachable.clear();
  for (const Weight& weight : list) {
    const auto count = static_cast<std::uint64_t>(weight.filters * weight.rows * weight.columns);
    make_reachable(weight.source, count * source_bytes(weight.elements));
    make_reachable(weight.destination, count * destination_bytes(weight.elements));
  }
  const std::vector<Launch> launches = plan_launches(list, *limits);
  for (const Launch& launch : launches) run_launch(launch, seed, counts);
  return static_cast<int>(launches.size());
}
}
