// The kernels of resampling without a GPU, as norm_model.cpp has those of group norm.
#include <cuda/resample_blocks.h>

#include <cstdint>
#include <memory>
#include <numeric>
#include <utility>

#include "gpu_model.h"

using namespace gpu_model;
using namespace nhwc::cuda;

namespace {

constexpr unsigned sector_bytes = 32;
constexpr unsigned resident_blocks = 512;  // of a GPU, whose sectors are in its second-level cache together

// What the accesses of all blocks cost, and how often each byte of the result is stored.
struct Cost {
  Counts counts;
  std::uint64_t moved_bytes;
  std::uint8_t* stores;
};

template <typename Block>
void run_block(const ResampleArguments& arguments, std::uint32_t index, char* shared, std::uint64_t shared_bytes,
               Cost& cost, std::set<std::uint64_t>& touched) {
  Trace trace;  // of the thread that runs
  Block(arguments, index, shared, {&trace, shared_bytes}).run([&](const auto& phase) {
    for (unsigned first = 0; first < resample_threads; first += warp) {
      Trace traces[warp];
      for (unsigned lane = 0; lane < warp; ++lane) {
        phase(first + lane);
        traces[lane] = std::exchange(trace, {});
      }
      count(traces, cost.counts);
      for (const Trace& each : traces) {
        for (const Range& range : each.loads) touched.insert(range.address / sector_bytes);
        for (const Range& range : each.stores) {
          touched.insert(range.address / sector_bytes);
          const std::uint64_t begin = range.address - CountingAccess::number(arguments.out);
          for (unsigned i = 0; i < range.bytes; ++i) ++cost.stores[begin + i];
        }
      }
    }
  });
}

using RunBlock = void (*)(const ResampleArguments&, std::uint32_t, char*, std::uint64_t, Cost&,
                          std::set<std::uint64_t>&);

}  // namespace

extern "C" {

/// Runs the kernel on memory that it may reach, in an order of blocks by `seed`. Returns the bytes of a vector, or 0
/// where it cannot be launched. `numbers` are the input's and the output's sizes and the padding of each axis.
int run_resample_model(int mode, const std::int32_t* numbers, const double* scales, int is_transposed,
                       std::uint64_t samples, std::uint64_t channels, int type, std::uint32_t element_bytes,
                       const void* input, std::uint64_t input_bytes, void* out, std::uint64_t out_bytes, unsigned seed,
                       Cost* cost) {
  ResampleAxis axes[3];
  for (int axis = 0; axis < 3; ++axis) {
    axes[axis] = {static_cast<ResampleMode>(mode), numbers[axis], numbers[3 + axis], numbers[6 + axis], scales[axis]};
  }
  const std::uint64_t addresses = CountingAccess::number(input) | CountingAccess::number(out);
  const ResampleArguments arguments{plan_resampling(axes, is_transposed, samples, channels, element_bytes, addresses),
                                    input, out};
  const ResamplePlan& plan = arguments.plan;
  if (!plan.can_launch || plan.samples != samples) return 0;
  if (!cost) return plan.bytes;
  reachable.clear();
  make_reachable(input, input_bytes);
  make_reachable(out, out_bytes);
  const std::uint64_t blocks = plan.blocks(), bytes = plan.shared_bytes(element_bytes == 8 ? 8 : 4);
  const auto shared = std::make_unique<Line[]>(bytes / sizeof(Line) + 1);
  const RunBlock run = with_resample_block<CountingAccess>(
      static_cast<NormType>(type), plan,
      [](auto block) -> RunBlock { return run_block<typename decltype(block)::Type>; });
  std::uint64_t stride = seed == 0 ? 1 : blocks / 2 + seed;
  while (std::gcd(stride, blocks) != 1) ++stride;
  std::set<std::uint64_t> touched;
  for (std::uint64_t block = 0; block < blocks; ++block) {
    std::memset(shared.get(), 0xA5, bytes);
    run(arguments, block * stride % blocks, shared.get()->bytes, bytes, *cost, touched);
    if (block % resident_blocks == resident_blocks - 1 || block == blocks - 1) {
      cost->moved_bytes += touched.size() * sector_bytes;
      touched.clear();
    }
  }
  return plan.bytes;
}

/// Returns whether a quotient is right for all of these dividends.
int check_reciprocal(std::uint32_t divisor, std::uint32_t begin, std::uint32_t end) {
  const Reciprocal reciprocal(divisor);
  for (std::uint32_t dividend = begin; dividend < end; ++dividend) {
    if (reciprocal.quotient(dividend) != dividend / divisor) return 0;
  }
  return 1;
}
}
