// A GPU without a GPU: runs planned launches on the CPU, thread by thread and phase by phase, and counts what a warp's
// accesses would cost. A shared library for the tests, with a C interface.
//
// The model: a warp's access to global memory costs the sectors of 32 bytes that it touches. Shared memory has 32 banks
// of 4 bytes and serves 128 bytes at a time: a warp in one go for accesses of up to 4 bytes, by half warps for 8, by
// quarter warps for 16; each go costs as many passes as the most words asked of one bank.
#include <torch_nhwc/tile.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <vector>

using namespace nhwc::cuda;

namespace {

constexpr unsigned warp = 32;

struct Range {
  std::uint64_t address;
  unsigned bytes;
};

// What one thread asks for in one phase, in its order.
struct Trace {
  std::vector<Range> loads, stores, shared_loads, shared_stores;
};

struct Counts {
  std::uint64_t load_bytes, load_sectors, store_bytes, store_sectors, shared_passes, shared_passes_at_least;
};

// Bounds of the memory that the phases may touch.
struct Memory {
  const char* tile;
  std::uint64_t tile_bytes;
};

struct CountingAccess : DirectAccess {
  Trace* trace;
  Memory memory;

  static std::uint64_t number(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }
  template <typename Value>
  static void check(bool is_right) {
    if (!is_right) std::abort();
  }
  template <typename Value>
  Value load(const void* from) const {
    check<Value>(number(from) % sizeof(Value) == 0);
    if (trace) trace->loads.push_back({number(from), sizeof(Value)});
    return DirectAccess::load<Value>(from);
  }
  template <typename Value>
  void store(void* to, const Value& value) const {
    check<Value>(number(to) % sizeof(Value) == 0);
    if (trace) trace->stores.push_back({number(to), sizeof(Value)});
    DirectAccess::store(to, value);
  }
  template <typename Value>
  Value load_shared(const char* tile, std::uint32_t offset) const {
    check<Value>(offset % sizeof(Value) == 0 && offset + sizeof(Value) <= memory.tile_bytes);
    if (trace) trace->shared_loads.push_back({offset, sizeof(Value)});
    return DirectAccess::load_shared<Value>(tile, offset);
  }
  template <typename Value>
  void store_shared(char* tile, std::uint32_t offset, const Value& value) const {
    check<Value>(offset % sizeof(Value) == 0 && offset + sizeof(Value) <= memory.tile_bytes);
    if (trace) trace->shared_stores.push_back({offset, sizeof(Value)});
    DirectAccess::store_shared(tile, offset, value);
  }
};

// The n-th accesses of a warp's threads are one access of the warp.
template <typename Count>
void for_each_access(const Trace* traces, std::vector<Range> Trace::* kind, const Count& count) {
  std::size_t longest = 0;
  for (unsigned lane = 0; lane < warp; ++lane) longest = std::max(longest, (traces[lane].*kind).size());
  for (std::size_t n = 0; n < longest; ++n) {
    std::vector<std::pair<unsigned, Range>> ranges;
    for (unsigned lane = 0; lane < warp; ++lane) {
      if (n < (traces[lane].*kind).size()) ranges.push_back({lane, (traces[lane].*kind)[n]});
    }
    count(ranges);
  }
}

void count_sectors(const Trace* traces, std::vector<Range> Trace::* kind, std::uint64_t& bytes,
                   std::uint64_t& sectors) {
  for_each_access(traces, kind, [&](const auto& ranges) {
    std::set<std::uint64_t> touched;
    for (const auto& [lane, range] : ranges) {
      bytes += range.bytes;
      for (auto sector = range.address / 32; sector <= (range.address + range.bytes - 1) / 32; ++sector) {
        touched.insert(sector);
      }
    }
    sectors += touched.size();
  });
}

void count_passes(const Trace* traces, std::vector<Range> Trace::* kind, std::uint64_t& passes, std::uint64_t& least) {
  for_each_access(traces, kind, [&](const auto& ranges) {
    const unsigned bytes = ranges[0].second.bytes, lanes_of_a_go = bytes <= 4 ? warp : 128 / bytes;
    for (unsigned go = 0; go < warp / lanes_of_a_go; ++go) {
      std::set<std::uint64_t> words[32];
      std::size_t most = 0;
      for (const auto& [lane, range] : ranges) {
        if (lane / lanes_of_a_go != go) continue;
        for (auto word = range.address / 4; word <= (range.address + range.bytes - 1) / 4; ++word) {
          words[word % 32].insert(word);
          most = std::max(most, words[word % 32].size());
        }
      }
      passes += most;
      least += most != 0;
    }
  });
}

void count(const Trace* traces, Counts& counts) {
  count_sectors(traces, &Trace::loads, counts.load_bytes, counts.load_sectors);
  count_sectors(traces, &Trace::stores, counts.store_bytes, counts.store_sectors);
  count_passes(traces, &Trace::shared_loads, counts.shared_passes, counts.shared_passes_at_least);
  count_passes(traces, &Trace::shared_stores, counts.shared_passes, counts.shared_passes_at_least);
}

// All threads of a block do one phase.
template <typename Phase>
void run_phase(Counts* counts, const Phase& phase) {
  for (unsigned first = 0; first < threads_of_a_block; first += warp) {
    Trace traces[warp];
    for (unsigned lane = 0; lane < warp; ++lane) phase(first + lane, counts ? &traces[lane] : nullptr);
    if (counts) count(traces, *counts);
  }
}

template <Elements elements>
void run_tile(const Filters& filters, std::uint32_t index, char* shared, std::uint64_t shared_bytes, Counts* counts) {
  const auto tile = [&](Trace* trace) {
    return Tile<elements, CountingAccess>(filters, index, shared, {{}, trace, {shared, shared_bytes}});
  };
  run_phase(counts, [&](unsigned thread, Trace* trace) { tile(trace).load(thread); });
  run_phase(counts, [&](unsigned thread, Trace* trace) { tile(trace).store(thread); });
}

template <Elements elements>
void run_block(const Launch& launch, std::uint32_t block, Counts* counts) {
  const Filters& filters = filters_of_block(launch.filters.data(), launch.filters.size(), block);
  const auto quads = std::make_unique<Quad[]>(launch.shared_bytes / 16 + 1);
  char* shared = reinterpret_cast<char*>(quads.get());
  std::memset(shared, 0xA5, launch.shared_bytes);
  const std::uint32_t index = block - filters.first_block;
  if (launch.scratch_bytes == 0) return run_tile<elements>(filters, index, shared, launch.shared_bytes, counts);
  const auto scratch = std::make_unique<Quad[]>(launch.scratch_bytes / 16);
  const bool is_last = &filters == &launch.filters.back();
  const std::uint32_t blocks = (is_last ? launch.blocks : (&filters)[1].first_block) - filters.first_block;
  for (std::uint32_t filter = index; filter < filters.count; filter += blocks) {
    const LongFilter parts(filters, elements, filter, reinterpret_cast<char*>(scratch.get()));
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

}  // namespace

extern "C" {

struct LaunchSummary {
  std::uint32_t elements, weights, blocks, shared_bytes, ways;  // the ways as bits
  std::uint64_t scratch_bytes;
};

/// Converts the weights as a GPU of these limits would, in the order of blocks that `seed` shuffles. Returns the number
/// of launches, of which at most `room` are described; -1 if a weight cannot be planned.
int run_model(const Weight* weights, int number, const Limits* limits, unsigned seed, Counts* counts,
              LaunchSummary* summaries, int room) {
  const std::vector<Weight> list(weights, weights + number);
  if (!std::all_of(list.begin(), list.end(), can_plan)) return -1;
  const std::vector<Launch> launches = plan_launches(list, *limits);
  for (std::size_t i = 0; i < launches.size(); ++i) {
    const Launch& launch = launches[i];
    std::uint32_t ways = 0;
    for (const Filters& filters : launch.filters) ways |= 1u << static_cast<int>(filters.way);
    if (static_cast<int>(i) < room) {
      summaries[i] = {static_cast<std::uint32_t>(launch.elements),
                      static_cast<std::uint32_t>(launch.filters.size()),
                      launch.blocks,
                      launch.shared_bytes,
                      ways,
                      launch.scratch_bytes};
    }
    // An order that visits every block once: a step that has no divisor in common with the number of blocks.
    std::uint64_t step = launch.blocks / 2 + seed % 7 + 1;
    while (std::__gcd(step, std::uint64_t{launch.blocks}) != 1) ++step;
    for (std::uint64_t block = 0; block < launch.blocks; ++block) {
      run_block_of[static_cast<int>(launch.elements)](launch, block * step % launch.blocks, counts);
    }
  }
  return static_cast<int>(launches.size());
}
}
