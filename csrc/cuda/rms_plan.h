// RMS norm over the channels of a row on a GPU: its arguments, and how the work is cut into blocks.
//
// Sums over channels are made by neighbouring threads for each row, those over rows by threads that keep their
// channels. The backward does both for a few rows at a time, a tile, which it reads once from memory and then from the
// first-level cache.
//
// Needs C++17 and no other library, CUDA's included.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/norm_plan.h"

namespace nhwc::cuda {

constexpr unsigned rms_threads = norm_threads;
constexpr int rms_types = 4;  // the first ones of `NormType`

/// Returns how many blocks run at a time, with the registers that they need.
constexpr unsigned rms_blocks_of_processor(bool is_backward, bool has_silu) { return is_backward && has_silu ? 3 : 4; }

/// How blocks share dense rows. A vector has 16 bytes, or is one element.
struct RmsPlan {
  std::uint64_t rows;
  std::uint32_t channels, lanes;  ///< of a row, and of them in a vector
  std::uint32_t vectors;          ///< of a row
  std::uint32_t shift;            ///< `1 << shift` threads make the sums of a row
  std::uint32_t columns, slots;   ///< vectors of a row and rows that threads take at a time for sums over rows
  std::uint32_t tile_rows;        ///< a multiple of the slots
  std::uint32_t chunks;           ///< blocks of the backward
  std::uint64_t chunk_rows;

  /// The rows of a block of the forward.
  std::uint32_t block_rows() const { return rms_threads >> shift; }
  std::uint64_t blocks(bool is_backward) const {
    return is_backward ? chunks : (rows + block_rows() - 1) / block_rows();
  }
  /// Sums over rows for each channel, of gradients and of their products: too many are in global memory.
  bool has_shared_sums() const { return vectors <= rms_threads; }
  std::uint64_t numbers_of_chunks() const { return std::uint64_t{2} * chunks * channels; }
  std::uint32_t shared_bytes(bool is_backward, std::uint32_t real_bytes) const {
    const std::uint32_t arrays = is_backward ? 4 + (has_shared_sums() ? 2 * lanes : 0) : 1;
    return arrays * rms_threads * real_bytes;
  }
  bool can_launch() const {
    constexpr std::uint64_t most_blocks = (std::uint64_t{1} << 31) - 1;
    return rows > 0 && channels > 0 && channels <= 1u << 24 && blocks(false) <= most_blocks;
  }
};

/// @param addresses  of all tensors, combined by "or".
inline RmsPlan plan_rms(std::uint64_t rows, std::uint32_t channels, NormType type, std::uint64_t addresses,
                        bool has_silu, std::uint32_t processors) {
  const std::uint32_t lanes = 16 / bytes_of(type);
  RmsPlan plan{};
  plan.rows = rows;
  plan.channels = channels;
  if (!plan.can_launch()) return plan;
  plan.lanes = channels % lanes == 0 && addresses % 16 == 0 ? lanes : 1;
  plan.vectors = channels / plan.lanes;
  // A thread has two or three vectors of a row, so that few threads are without.
  while ((4u << plan.shift) <= plan.vectors && (2u << plan.shift) <= rms_threads) ++plan.shift;
  plan.columns = std::min(plan.vectors, rms_threads);
  plan.slots = rms_threads / plan.columns;
  plan.tile_rows = plan.block_rows() / plan.slots * plan.slots;
  // As many blocks as run at a time, unless the sums of a chunk would be much beside its rows.
  const std::uint64_t least = std::max(plan.tile_rows, 32u);
  const std::uint64_t chunks =
      std::clamp<std::uint64_t>(rows / least, 1, std::uint64_t{processors} * rms_blocks_of_processor(true, has_silu));
  plan.chunk_rows = (rows + chunks - 1) / chunks;
  plan.chunk_rows = (plan.chunk_rows + plan.tile_rows - 1) / plan.tile_rows * plan.tile_rows;
  plan.chunks = static_cast<std::uint32_t>((rows + plan.chunk_rows - 1) / plan.chunk_rows);
  return plan;
}

/// What the kernels read and write. All has the type of the activation but for the scratch, which is float, of float64
/// double.
struct RmsArguments {
  RmsPlan plan;
  const void *input, *grad, *weight;
  const void* bias;  ///< may be null
  void* out;         ///< the output, or the input's gradient, which may be null
  void* sums;        ///< scratch of the backward: `plan.numbers_of_chunks()`, or null for no gradients of parameters
  double scale, eps;
  const void* input_bias;  ///< of the forward, added to the input; may be null
};

/// Returns the arguments of `NormStep::parameter_gradients`, which adds up the sums of the chunks.
inline NormArguments arguments_of_sums(const RmsArguments& rms, void* grad_weight, void* grad_bias) {
  NormArguments arguments{};
  arguments.plan.samples = rms.plan.chunks;
  arguments.plan.channels = rms.plan.channels;
  arguments.sample_sums = rms.sums;
  arguments.grad_weight = grad_weight;
  arguments.grad_bias = grad_bias;
  return arguments;
}

}  // namespace nhwc::cuda
