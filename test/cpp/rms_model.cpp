// The kernels of RMS norm without a GPU, as norm_model.cpp has those of group norm.
#include <cuda/rms_blocks.h>

#include <cstdint>
#include <list>
#include <memory>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "gpu_model.h"

using namespace gpu_model;
using namespace nhwc::cuda;

namespace {

constexpr unsigned sector_bytes = 32;

// What a kernel is given; what is null is not there.
struct Call {
  std::uint64_t rows;
  std::uint32_t channels, processors;
  std::int32_t type, has_silu, is_backward;
  std::uint32_t seed;  // of the order of blocks
  double scale, eps;
  const void *input, *grad, *weight, *bias, *input_bias;
  void *out, *grad_weight, *grad_bias;
};

// What the accesses of all blocks cost, and how often each byte of `out` is stored.
struct Cost {
  Counts counts;
  std::uint64_t moved_bytes;
  std::uint8_t* stores;
};

// A block's share of the first-level cache, which forgets what was used longest ago.
class Cache {
 public:
  /// Returns whether a sector has to be moved.
  bool misses(std::uint64_t sector) {
    const auto found = places_.find(sector);
    const bool is_new = found == places_.end();
    if (!is_new) sectors_.erase(found->second);
    places_[sector] = sectors_.insert(sectors_.end(), sector);
    if (sectors_.size() > (40u << 10) / sector_bytes) {
      places_.erase(sectors_.front());
      sectors_.pop_front();
    }
    return is_new;
  }

 private:
  std::list<std::uint64_t> sectors_;
  std::unordered_map<std::uint64_t, std::list<std::uint64_t>::iterator> places_;
};

struct Memory {
  std::uint64_t begin, bytes;
  bool has(std::uint64_t address) const { return address >= begin && address < begin + bytes; }
};

// What a kernel's accesses are counted by.
struct Counting {
  Memory out, weight, bias, input_bias;
  Cost& cost;
  Cache cache = {};                            // of a block
  std::set<std::uint64_t> of_parameters = {};  // in the second-level cache

  void add(const Trace (&traces)[warp]) {
    count(traces, cost.counts);
    for (const Trace& each : traces) {
      for (const Range& range : each.loads) move(range.address);
      for (const Range& range : each.stores) {
        move(range.address);
        for (unsigned i = 0; out.has(range.address) && i < range.bytes; ++i) {
          ++cost.stores[range.address + i - out.begin];
        }
      }
    }
  }

 private:
  void move(std::uint64_t address) {
    const std::uint64_t sector = address / sector_bytes;
    const bool is_parameter = weight.has(address) || bias.has(address) || input_bias.has(address);
    if (is_parameter ? of_parameters.insert(sector).second : cache.misses(sector)) cost.moved_bytes += sector_bytes;
  }
};

template <typename Block, typename Arguments>
void run_blocks(const Arguments& arguments, std::uint64_t blocks, std::uint64_t shared_bytes, std::uint32_t seed,
                Counting counting) {
  const auto shared = std::make_unique<Line[]>(shared_bytes / sizeof(Line) + 1);
  std::uint64_t stride = seed == 0 ? 1 : blocks / 2 + seed;
  while (std::gcd(stride, blocks) != 1) ++stride;
  for (std::uint64_t block = 0; block < blocks; ++block) {
    std::memset(shared.get(), 0xA5, shared_bytes);
    counting.cache = {};
    Trace trace;  // of the thread that runs
    Block(arguments, static_cast<std::uint32_t>(block * stride % blocks), shared.get()->bytes, {&trace, shared_bytes})
        .run([&](const auto& phase) {
          for (unsigned first = 0; first < rms_threads; first += warp) {
            Trace traces[warp];
            for (unsigned lane = 0; lane < warp; ++lane) {
              phase(first + lane);
              traces[lane] = std::exchange(trace, {});
            }
            counting.add(traces);
          }
        });
  }
}

template <NormType type>
void add_up(const RmsArguments& rms, const Call& call, Cost& cost) {
  const NormArguments arguments = arguments_of_sums(rms, call.grad_weight, call.grad_bias);
  constexpr NormStep step = NormStep::parameter_gradients;
  run_blocks<BlockOfStep<step, type, 1, Follower::nothing, CountingAccess>>(arguments, blocks_of(step, arguments.plan),
                                                                            shared_bytes_of(step, arguments.plan, type),
                                                                            call.seed, {{}, {}, {}, {}, cost});
}

}  // namespace

extern "C" {

/// Runs the kernels of a forward or backward on memory that they may reach. Returns the elements of a vector, or 0 for
/// what cannot be launched; without a cost nothing runs.
int run_rms_model(const Call* call, Cost* cost) {
  const auto type = static_cast<NormType>(call->type);
  const std::uint64_t bytes = bytes_of(type), of_row = call->channels * bytes, all = call->rows * of_row;
  std::uint64_t addresses = 0;
  for (const void* each :
       {call->input, call->grad, call->weight, call->bias, call->input_bias, static_cast<const void*>(call->out)}) {
    addresses |= CountingAccess::number(each);
  }
  const RmsPlan plan = plan_rms(call->rows, call->channels, type, addresses, call->has_silu, call->processors);
  if (!plan.can_launch()) return 0;
  if (!cost) return static_cast<int>(plan.lanes);
  reachable.clear();
  for (const void* each : {call->input, call->grad, static_cast<const void*>(call->out)}) {
    if (each) make_reachable(each, all);
  }
  for (const void* each : {call->weight, call->bias, call->input_bias, static_cast<const void*>(call->grad_weight),
                           static_cast<const void*>(call->grad_bias)}) {
    if (each) make_reachable(each, of_row);
  }
  const std::uint64_t real_bytes = type == NormType::float64 ? 8 : 4, of_sums = plan.numbers_of_chunks() * real_bytes;
  const auto sums = std::make_unique<Line[]>(of_sums / sizeof(Line) + 1);
  std::memset(sums.get(), 0xFF, of_sums);  // undefined numbers
  const bool has_sums = call->grad_weight || call->grad_bias;
  if (has_sums) make_reachable(sums.get(), of_sums);
  const RmsArguments arguments{
      plan,        call->input, call->grad,      call->weight, call->bias, call->out, has_sums ? sums.get() : nullptr,
      call->scale, call->eps,   call->input_bias};
  with_rms_block<CountingAccess>(call->is_backward, type, call->has_silu, plan, [&](auto block) {
    run_blocks<typename decltype(block)::Type>(arguments, plan.blocks(call->is_backward),
                                               plan.shared_bytes(call->is_backward, real_bytes), call->seed,
                                               {{CountingAccess::number(call->out), all},
                                                {CountingAccess::number(call->weight), of_row},
                                                {CountingAccess::number(call->bias), of_row},
                                                {CountingAccess::number(call->input_bias), of_row},
                                                *cost});
  });
  if (!has_sums) return static_cast<int>(plan.lanes);
  switch (type) {
    case NormType::float32: add_up<NormType::float32>(arguments, *call, *cost); break;
    case NormType::bfloat16: add_up<NormType::bfloat16>(arguments, *call, *cost); break;
    case NormType::float16: add_up<NormType::float16>(arguments, *call, *cost); break;
    default: add_up<NormType::float64>(arguments, *call, *cost); break;
  }
  return static_cast<int>(plan.lanes);
}
}
