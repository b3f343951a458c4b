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

template <NormType type, unsigned lanes, unsigned taps, unsigned stride>
void run_step(DepthwiseStep step, const Job& job) {
  if (step == DepthwiseStep::convolve) {
    run_block<DepthwiseConvolve<type, lanes, taps, stride, CountingAccess>>(job);
  } else if (step == DepthwiseStep::chunk_gradients) {
    run_block<DepthwiseGradients<type, lanes, taps, stride, CountingAccess>>(job);
  } else {
    run_block<DepthwiseMerge<type, CountingAccess>>(job);
  }
}

template <NormType type, unsigned lanes, unsigned taps>
void run_taps(DepthwiseStep step, const Job& job) {
  job.arguments.plan.stride[2] == 1 ? run_step<type, lanes, taps, 1>(step, job)
                                    : run_step<type, lanes, taps, 2>(step, job);
}

template <NormType type, unsigned lanes>
void run_lanes(DepthwiseStep step, const Job& job) {
  switch (job.arguments.plan.kernel[2]) {
    case 3: return run_taps<type, lanes, 3>(step, job);
    case 5: return run_taps<type, lanes, 5>(step, job);
    default: return run_taps<type, lanes, 7>(step, job);
  }
}

template <NormType type>
void run_type(DepthwiseStep step, const Job& job) {
  job.arguments.plan.lanes == 1 ? run_lanes<type, 1>(step, job) : run_lanes<type, depthwise_lanes>(step, job);
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
  const auto run = type == 0   ? run_type<NormType::float32>
                   : type == 1 ? run_type<NormType::bfloat16>
                               : run_type<NormType::float16>;
  const auto blocks = static_cast<std::uint32_t>(blocks_of(step, arguments->plan));
  for (std::uint32_t i = 0; i < blocks; ++i) {
    std::memset(shared.get(), 0xA5, bytes);
    const std::uint32_t block = is_reversed ? blocks - 1 - i : i;
    run(step, {*arguments, threads_of(step, arguments->plan), block, shared.get()->bytes, bytes, counts, moved_bytes});
  }
}
}
