// The kernels of depthwise 3D convolutions without a GPU: runs every thread of every block on the CPU, phase by phase,
// and counts what a warp's accesses would cost (gpu_model.h). A shared library for the tests, with a C interface.
#include <cuda/depthwise_blocks.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "gpu_model.h"

using namespace gpu_model;
using namespace nhwc::cuda;

namespace {

struct Job {
  const DepthwiseArguments& arguments;
  std::uint32_t threads, block;
  char* shared;
  std::uint64_t shared_bytes;
  Counts* counts;
  std::uint64_t* moved_bytes;
};

template <typename Block>
void run_block(const Job& job) {
  constexpr unsigned sector_bytes = 32;
  Trace trace;  // of the thread that runs
  std::set<std::uint64_t> touched;
  Block(job.arguments, job.block, job.shared, {&trace, job.shared_bytes}).run_phases([&](const auto& phase) {
    for (unsigned first = 0; first < job.threads; first += warp) {
      Trace traces[warp];
      for (unsigned lane = 0; lane < warp && first + lane < job.threads; ++lane) {
        phase(first + lane);
        traces[lane] = std::exchange(trace, {});
      }
      if (!job.counts) continue;
      count(traces, *job.counts);
      for (const Trace& each : traces) {
        for (const auto* ranges : {&each.loads, &each.stores}) {
          for (const Range& range : *ranges) touched.insert(range.address / sector_bytes);
        }
      }
    }
  });
  *job.moved_bytes += touched.size() * sector_bytes;
}

}  // namespace

extern "C" {

void plan_depthwise_model(DepthwisePlan* plan, int is_aligned, std::uint32_t processors) {
  plan_depthwise(*plan, is_aligned != 0, processors);
}

std::uint64_t depthwise_blocks_of(int step, const DepthwisePlan* plan) {
  return blocks_of(static_cast<DepthwiseStep>(step), *plan);
}

/// Runs one kernel, its blocks from the first or from the last on. The memory is what the kernel may reach.
void run_depthwise_model(int number, int type, const DepthwiseArguments* arguments, int is_reversed,
                         const std::uint64_t* memory, int parts, Counts* counts, std::uint64_t* moved_bytes) {
  reachable.clear();
  for (int i = 0; i < parts; ++i) make_reachable(reinterpret_cast<const void*>(memory[2 * i]), memory[2 * i + 1]);
  const auto step = static_cast<DepthwiseStep>(number);
  const std::uint32_t bytes = shared_bytes_of(step, arguments->plan);
  CountingAccess::check(bytes <= 48 << 10);
  const auto shared = std::make_unique<Line[]>(bytes / sizeof(Line) + 1);
  const auto blocks = static_cast<std::uint32_t>(blocks_of(step, arguments->plan));
  for (std::uint32_t i = 0; i < blocks; ++i) {
    std::memset(shared.get(), 0xA5, bytes);
    const std::uint32_t block = is_reversed ? blocks - 1 - i : i;
    const Job job = {*arguments, threads_of(step, arguments->plan), block, shared[0].bytes, bytes, counts, moved_bytes};
    with_depthwise_block<CountingAccess>(step, static_cast<NormType>(type), arguments->plan,
                                         [&](auto block_type) { run_block<typename decltype(block_type)::Type>(job); });
  }
}
}
