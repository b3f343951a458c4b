// Depthwise 3D convolution of channels-last activations on a GPU: its arguments, and how the work is cut into blocks.
//
// Needs C++17 and no other library, CUDA's included.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/norm_plan.h"
#include "torch_nhwc/cuda/launch.h"

namespace nhwc::cuda {

/// Adjacent threads take vectors of channels, which are the channels of a block.
constexpr unsigned channel_threads = 8;
constexpr unsigned depthwise_threads = 256, depthwise_slots = depthwise_threads / channel_threads;
constexpr unsigned most_gradient_threads = 512;
constexpr unsigned most_taps = 7;  // along an axis

/// The elements of a vector, if channels and alignment allow vectors.
constexpr unsigned depthwise_lanes = 4;

/// Outputs along the width that a thread computes at a time.
constexpr unsigned depthwise_run(unsigned stride) { return stride == 1 ? 8 : 4; }

/// A convolution from `input` to `output` sizes, each of depth, height and width. Dilations are 1.
struct DepthwisePlan {
  std::uint32_t samples, channels;
  std::int32_t input[3], output[3], kernel[3], stride[3], padding[3];
  std::uint32_t lanes;
  std::uint32_t channel_tiles;
  std::uint32_t runs;      ///< of a row of outputs
  std::uint32_t slots[3];  ///< threads of a block along depth, height, and the runs of a row
  std::uint32_t tiles[3];  ///< of blocks along the same; a block takes several along the depth
  std::uint32_t steps;     ///< of a block along the depth
  std::uint32_t copies;    ///< of all taps that the threads of a block sum the weight's gradient in
  std::uint32_t chunks;    ///< of runs, each of which a block sums the weight's gradient of
  std::uint32_t chunk_runs;

  NHWC_HOST_DEVICE std::uint32_t taps() const { return static_cast<std::uint32_t>(kernel[0] * kernel[1] * kernel[2]); }
  NHWC_HOST_DEVICE std::uint32_t threads() const { return channel_threads * slots[0] * slots[1] * slots[2]; }
  /// The rows of taps along the width.
  NHWC_HOST_DEVICE std::uint32_t tap_rows() const { return static_cast<std::uint32_t>(kernel[0] * kernel[1]); }
  NHWC_HOST_DEVICE std::uint64_t all_runs() const {
    return std::uint64_t{samples} * static_cast<std::uint32_t>(output[0]) * static_cast<std::uint32_t>(output[1]) *
           runs;
  }
  std::uint64_t blocks() const {
    const std::uint32_t depths = (tiles[0] + steps - 1) / steps;
    return std::uint64_t{samples} * depths * tiles[1] * tiles[2] * channel_tiles;
  }
};

/// Fills in how the work is cut, for so many processors.
inline void plan_depthwise(DepthwisePlan& plan, bool is_aligned, std::uint32_t processors) {
  const auto quotient = [](std::uint32_t number, std::uint32_t divisor) { return (number + divisor - 1) / divisor; };
  plan.lanes = is_aligned && plan.channels % depthwise_lanes == 0 ? depthwise_lanes : 1;
  plan.channel_tiles = quotient(plan.channels, channel_threads * plan.lanes);
  plan.runs = quotient(static_cast<std::uint32_t>(plan.output[2]), depthwise_run(plan.stride[2]));
  // A tile of 16 x 4 x 4 outputs, which shares most of its input. What the volume does not fill the depth takes.
  plan.slots[2] = std::min(plan.runs, 2u);
  plan.slots[1] = plan.output[1] >= 4 ? 4 : plan.output[1] >= 2 ? 2 : 1;
  plan.slots[0] = depthwise_slots / plan.slots[1] / plan.slots[2];
  plan.tiles[2] = quotient(plan.runs, plan.slots[2]);
  plan.tiles[1] = quotient(static_cast<std::uint32_t>(plan.output[1]), plan.slots[1]);
  plan.steps = 1;
  const auto cut_depth = [&] { plan.tiles[0] = quotient(static_cast<std::uint32_t>(plan.output[0]), plan.slots[0]); };
  for (cut_depth(); plan.blocks() < processors && plan.slots[0] > 1 && plan.threads() > 64; cut_depth()) {
    plan.slots[0] /= 2;
  }
  const std::uint64_t enough = std::uint64_t{8} * processors;  // of blocks: each loads its filters
  plan.steps = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(plan.blocks() / enough, 1, plan.tiles[0]));

  plan.copies = std::max(1u, most_gradient_threads / channel_threads / plan.tap_rows());
  const std::uint64_t least_runs = std::uint64_t{2} * plan.copies;
  const std::uint64_t wanted = quotient(4 * processors, plan.channel_tiles);
  const std::uint64_t chunks = std::clamp<std::uint64_t>(plan.all_runs() / least_runs, 1, wanted);
  plan.chunk_runs = static_cast<std::uint32_t>((plan.all_runs() + chunks - 1) / chunks);
  plan.chunks = static_cast<std::uint32_t>((plan.all_runs() + plan.chunk_runs - 1) / plan.chunk_runs);
}

/// What the kernels read and write. Activations are dense and channels-last, of less than 2^31 elements; filters are
/// `[channels, taps]` of the activations' type.
struct DepthwiseArguments {
  DepthwisePlan plan;
  const void *input, *weight, *bias;  ///< the last may be null
  void* out;                          ///< an activation, or the weight's gradient
  const void* grad;                   ///< of the output, for the weight's gradient
  float* sums;                        ///< scratch for it: `[chunks, taps, channels]`
  bool is_flipped;                    ///< the taps are in reverse order: an input's gradient
};

enum class DepthwiseStep : std::uint8_t { convolve, chunk_gradients, merge_gradients };
constexpr int depthwise_steps = 3;

constexpr unsigned merged_channels = 32, merging_threads = 256;

inline std::uint64_t blocks_of(DepthwiseStep step, const DepthwisePlan& plan) {
  switch (step) {
    case DepthwiseStep::convolve: return plan.blocks();
    case DepthwiseStep::chunk_gradients: return std::uint64_t{plan.chunks} * plan.channel_tiles;
    default: return std::uint64_t{plan.taps()} * ((plan.channels + merged_channels - 1) / merged_channels);
  }
}

inline std::uint32_t threads_of(DepthwiseStep step, const DepthwisePlan& plan) {
  return step == DepthwiseStep::convolve          ? plan.threads()
         : step == DepthwiseStep::chunk_gradients ? channel_threads * plan.tap_rows() * plan.copies
                                                  : merging_threads;
}

/// The shared memory of a block, which is at most 48 KB.
inline std::uint32_t shared_bytes_of(DepthwiseStep step, const DepthwisePlan& plan) {
  const std::uint32_t bytes_of_taps = plan.taps() * channel_threads * plan.lanes * 4;
  return step == DepthwiseStep::convolve          ? bytes_of_taps
         : step == DepthwiseStep::chunk_gradients ? bytes_of_taps * plan.copies
                                                  : merging_threads * 4;
}

}  // namespace nhwc::cuda
