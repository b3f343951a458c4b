// The model of a GPU for its threads' accesses to memory: checks them, records them, and counts what a warp's would
// cost.
//
// A warp's access to global memory costs the sectors of 32 bytes that it touches. Shared memory has 32 banks of 4 bytes
// and serves 128 bytes at a time: a warp in one go for accesses of up to 4 bytes, by half warps for 8, by quarter warps
// for 16; each go costs as many passes as the most words asked of one bank.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace gpu_model {

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
inline std::map<std::uint64_t, std::uint64_t> reachable;

inline void make_reachable(const void* memory, std::uint64_t bytes) {
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

inline void count_sectors(const Trace* traces, std::vector<Range> Trace::* kind, std::uint64_t& bytes,
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

inline void count_passes(const Trace* traces, std::vector<Range> Trace::* kind, std::uint64_t& passes,
                         std::uint64_t& least) {
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

inline void count(const Trace* traces, Counts& counts) {
  count_sectors(traces, &Trace::loads, counts.load_bytes, counts.load_sectors);
  count_sectors(traces, &Trace::stores, counts.store_bytes, counts.store_sectors);
  count_passes(traces, &Trace::shared_loads, counts.shared_passes, counts.shared_passes_at_least);
  count_passes(traces, &Trace::shared_stores, counts.shared_passes, counts.shared_passes_at_least);
}

// All threads of a block do one phase.
template <typename Phase>
void run_phase(unsigned threads, Counts* counts, const Phase& phase) {
  for (unsigned first = 0; first < threads; first += warp) {
    Trace traces[warp];
    for (unsigned lane = 0; lane < warp; ++lane) phase(first + lane, counts ? &traces[lane] : nullptr);
    if (counts) count(traces, *counts);
  }
}

// Memory on a GPU begins at a multiple of 256 bytes.
struct alignas(256) Line {
  char bytes[256];
};

}  // namespace gpu_model
