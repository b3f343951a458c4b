// The kernels of group norm without a GPU: runs every thread of every block on the CPU, phase by phase, and counts what
// a warp's accesses would cost (gpu_model.h). A shared library for the tests, with a C interface.
#include <cuda/norm_blocks.h>

#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>

#include "gpu_model.h"

using namespace gpu_model;
using namespace nhwc::cuda;

namespace {

constexpr unsigned sector_bytes = 32;
// The kernels of a step: by what follows, by type, of elements and of vectors.
constexpr int norm_kinds = followers * norm_types * 2;

// A tensor, and how often each of its elements is loaded and stored.
struct Tally {
  std::uint64_t begin, bytes;
  std::uint32_t element_bytes;
  std::uint16_t *loads, *stores;
};

void add(const Tally& tally, const std::vector<Range>& ranges, std::uint16_t* counts) {
  for (const Range& range : ranges) {
    if (range.address < tally.begin || range.address >= tally.begin + tally.bytes) continue;
    const std::uint64_t first = (range.address - tally.begin) / tally.element_bytes;
    for (unsigned i = 0; i < range.bytes / tally.element_bytes; ++i) ++counts[first + i];
  }
}

template <NormStep step, NormType type, bool is_vector, Follower follower>
void run_block(const NormArguments& arguments, std::uint32_t index, char* shared, std::uint64_t shared_bytes,
               Counts* counts, std::uint64_t* moved_bytes, const Tally* tallies, int tensors) {
  constexpr unsigned lanes = is_vector ? 16 / bytes_of(type) : 1;
  Trace trace;  // of the thread that runs
  std::set<std::uint64_t> touched;
  const auto all = [&](const auto& phase) {
    for (unsigned first = 0; first < norm_threads; first += warp) {
      Trace traces[warp];
      for (unsigned lane = 0; lane < warp; ++lane) {
        phase(first + lane);
        traces[lane] = std::exchange(trace, {});
        for (int i = 0; i < tensors; ++i) {
          add(tallies[i], traces[lane].loads, tallies[i].loads);
          add(tallies[i], traces[lane].stores, tallies[i].stores);
        }
      }
      if (!counts) continue;
      count(traces, *counts);
      for (const Trace& each : traces) {
        for (const auto* ranges : {&each.loads, &each.stores}) {
          for (const Range& range : *ranges) touched.insert(range.address / sector_bytes);
        }
      }
    }
  };
  BlockOfStep<step, type, lanes, follower, CountingAccess>(arguments, index, shared, {&trace, shared_bytes}).run(all);
  if (moved_bytes) *moved_bytes += touched.size() * sector_bytes;
}

using RunBlock = void (*)(const NormArguments&, std::uint32_t, char*, std::uint64_t, Counts*, std::uint64_t*,
                          const Tally*, int);

constexpr Follower follower_of_kind(std::size_t kind) {
  const auto step = static_cast<NormStep>(kind / norm_kinds);
  return has_followers(step) ? static_cast<Follower>(kind / 2 / norm_types % followers) : Follower::nothing;
}

template <std::size_t... kinds>
RunBlock find(std::size_t kind, std::index_sequence<kinds...>) {
  static constexpr RunBlock all[] = {
      run_block<static_cast<NormStep>(kinds / norm_kinds), static_cast<NormType>(kinds / 2 % norm_types),
                (kinds % 2 != 0), follower_of_kind(kinds)>...};
  return all[kind];
}

}  // namespace

extern "C" {

/// Plans a norm, perhaps in chunks even if blocks could do all steps, and returns whether it can be launched.
int plan_norm_model(std::uint64_t samples, std::uint64_t rows, std::uint32_t channels, std::uint32_t groups, int type,
                    std::uint32_t offset, std::uint32_t processors, int in_chunks, NormPlan* plan) {
  const auto make = in_chunks ? plan_norm_in_chunks : plan_norm;
  *plan = make(samples, rows, channels, groups, static_cast<NormType>(type), offset, processors);
  return can_launch(*plan);
}

std::uint32_t norm_blocks_of(int step, const NormPlan* plan) { return blocks_of(static_cast<NormStep>(step), *plan); }

/// Runs one kernel, in an order of blocks by `seed`. The memory is what the kernel may reach. The bytes that it moves
/// are those of the sectors that a block touches: what it reads again is in the first-level cache.
void run_norm_model(int step, int type, const NormArguments* arguments, unsigned seed, const std::uint64_t* memory,
                    int parts, Counts* counts, std::uint64_t* moved_bytes, const Tally* tallies, int tensors) {
  reachable.clear();
  for (int i = 0; i < parts; ++i) make_reachable(reinterpret_cast<const void*>(memory[2 * i]), memory[2 * i + 1]);
  const NormPlan& plan = arguments->plan;
  const std::uint64_t blocks = norm_blocks_of(step, &plan);
  const auto bytes = shared_bytes_of(static_cast<NormStep>(step), plan, static_cast<NormType>(type));
  const auto shared = std::make_unique<Line[]>(bytes / sizeof(Line) + 1);
  const auto follower = static_cast<int>(follower_of(static_cast<NormStep>(step), *arguments));
  const RunBlock run = find(((step * followers + follower) * norm_types + type) * 2 + (plan.lanes > 1),
                            std::make_index_sequence<norm_steps * norm_kinds>());
  // An order that visits every block once: a step that has no divisor in common with the number of blocks.
  std::uint64_t stride = blocks / 2 + seed % 7 + 1;
  while (std::gcd(stride, blocks) != 1) ++stride;
  for (std::uint64_t block = 0; block < blocks; ++block) {
    std::memset(shared.get(), 0xA5, bytes);
    run(*arguments, block * stride % blocks, shared.get()->bytes, bytes, counts, moved_bytes, tallies, tensors);
  }
}
}
