// A GPU without a GPU: runs planned launches on the CPU, thread by thread and phase by phase, and counts what a warp's
// accesses would cost. A shared library for the tests, with a C interface.
//
// The model: a warp's access to global memory costs the sectors of 32 bytes that it touches. Shared memory has 32 banks
// of 4 bytes and serves 128 bytes at a time: a warp in one go for accesses of up to 4 bytes, by half warps for 8, by
// quarter warps for 16; each go costs as many passes as the most words asked of one bank.
#include <torch_nhwc/cuda/launch_plan.h>
#include <torch_nhwc/cuda/tile.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <utility>
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

// The memory of the weights and the scratch: the begin of each part by its end.
std::map<std::uint64_t, std::uint64_t> reachable;

void make_reachable(const void* memory, std::uint64_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(memory);
  if (bytes > 0) reachable[begin + bytes] = begin;
}

// Aborts at what a GPU would refuse: accesses that are misaligned, those beyond the memory of weights, and those beyond
// the tile. What one thread stores as a word another may load as a byte, which C++ allows by way of memcpy only.
struct CountingAccess {
  Trace* trace;
  std::uint64_t tile_bytes;

  static std::uint64_t number(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }
  static void check(bool is_right) {
    if (!is_right) std::abort();
  }
  template <typename Value>
  static void check_global(const void* pointer) {
    const auto part = reachable.upper_bound(number(pointer));
    check(part != reachable.end() && part->second <= number(pointer) && number(pointer) + sizeof(Value) <= part->first);
    check(number(pointer) % sizeof(Value) == 0);
  }
  template <typename Value>
  Value load(const void* from) const {
    check_global<Value>(from);
    if (trace) trace->loads.push_back({number(from), sizeof(Value)});
    Value value;
    std::memcpy(&value, from, sizeof(Value));
    return value;
  }
  template <typename Value>
  void store(void* to, const Value& value) const {
    check_global<Value>(to);
    if (trace) trace->stores.push_back({number(to), sizeof(Value)});
    std::memcpy(to, &value, sizeof(Value));
  }
  template <typename Value>
  Value load_shared(const char* tile, std::uint32_t offset) const {
    check(offset % sizeof(Value) == 0 && offset + sizeof(Value) <= tile_bytes);
    if (trace) trace->shared_loads.push_back({offset, sizeof(Value)});
    Value value;
    std::memcpy(&value, tile + offset, sizeof(Value));
    return value;
  }
  template <typename Value>
  void store_shared(char* tile, std::uint32_t offset, const Value& value) const {
    check(offset % sizeof(Value) == 0 && offset + sizeof(Value) <= tile_bytes);
    if (trace) trace->shared_stores.push_back({offset, sizeof(Value)});
    std::memcpy(tile + offset, &value, sizeof(Value));
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
    return Tile<elements, CountingAccess>(filters, index, shared, {trace, shared_bytes});
  };
  run_phase(counts, [&](unsigned thread, Trace* trace) { tile(trace).load(thread); });
  run_phase(counts, [&](unsigned thread, Trace* trace) { tile(trace).store(thread); });
}

// Memory on a GPU begins at a multiple of 256 bytes.
struct alignas(256) Line {
  char bytes[256];
};

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
