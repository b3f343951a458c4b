// Group norm on a GPU: its arguments, and how the work is cut into blocks. Instance norm has one channel in each group.
//
// A sample is cut into chunks of rows, and a wide row into tiles of channels, never by groups: one channel in each
// group makes as many blocks as all channels in one. A vector is 16 aligned bytes of memory. After so many vectors that
// they hold whole rows, which is a period, the channels of a vector repeat, so that a thread that steps by periods
// meets the same channels in each of its vectors, for any number of channels and any alignment of the first.
//
// Needs C++17 and no other library, CUDA's included.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

namespace nhwc::cuda {

/// The type of an activation, and of the result if that has another one, as under autocast.
enum class NormType : std::uint8_t { float32, bfloat16, float16, float64, bfloat16_to_float32, float16_to_float32 };
constexpr int norm_types = 6;

constexpr NormType input_type(NormType type) {
  return type == NormType::bfloat16_to_float32  ? NormType::bfloat16
         : type == NormType::float16_to_float32 ? NormType::float16
                                                : type;
}
constexpr NormType result_type(NormType type) { return type == input_type(type) ? type : NormType::float32; }
constexpr unsigned bytes_of(NormType type) { return type == NormType::float32 ? 4 : type == NormType::float64 ? 8 : 2; }

/// What follows a norm in the same pass.
enum class NormActivation : std::uint8_t { none, relu, leaky_relu, silu, gelu, gelu_tanh };

/// Kinds of kernels by what follows: nothing, or a residual and what is made of lines, also with a slope for each
/// channel, or of exponentials. The first goes by coefficients, the others by statistics, which may be older.
enum class Follower : std::uint8_t { nothing, lines, slopes, exponentials };
constexpr int followers = 4;

constexpr unsigned norm_threads = 256;

/// How blocks share an activation of `samples` dense matrices of `rows` x `channels`. Lengths along a row are in
/// vectors.
struct NormPlan {
  std::uint64_t samples, rows;
  std::uint32_t channels, groups;
  std::uint32_t lanes;         ///< elements of a vector, or 1 if the tensors differ in alignment
  std::uint32_t period;        ///< vectors until their channels repeat
  std::uint32_t width, tiles;  ///< of a tile, and tiles of a period
  std::uint32_t slots;         ///< vectors of a tile that a block takes at a time, a period apart
  std::uint32_t chunk_rows, chunks;
  std::uint32_t merged_groups;  ///< that one block merges, or a block that does all steps merges at a time
  std::uint32_t merges;         ///< of a block that does all steps for whole groups; 0 if each step has a kernel

  std::uint32_t channels_of_group() const { return channels / groups; }
  bool is_whole() const { return merges > 0; }
  /// The blocks that read or write activations.
  std::uint64_t blocks() const { return samples * chunks * tiles; }
  /// The blocks that merge the sums of chunks, each for some groups of a sample.
  std::uint64_t merging_blocks() const { return samples * ((groups + merged_groups - 1) / merged_groups); }
  /// The sums of all chunks, `of_each` for each channel.
  std::uint64_t numbers_of_chunks(unsigned of_each) const { return samples * chunks * channels * of_each; }
};

constexpr unsigned channels_of_parameter_block = 8;

/// The channels of which sums are in different banks of shared memory.
constexpr unsigned channels_of_banks(NormType type) { return type == NormType::float64 ? 16 : 32; }

/// The offset of tensors that differ in it.
constexpr std::uint32_t differing_offsets = 16;

/// Returns a plan that cuts samples into chunks, with a kernel for each step.
/// @param offset  by how many bytes all tensors are off an alignment to 16.
inline NormPlan plan_norm_in_chunks(std::uint64_t samples, std::uint64_t rows, std::uint32_t channels,
                                    std::uint32_t groups, NormType type, std::uint32_t offset,
                                    std::uint32_t processors) {
  NormPlan plan{samples, rows, channels, groups, 1, channels, 1, 1, 1, 1, 1, 1, 0};
  const unsigned lanes = 16 / bytes_of(type);
  const std::uint32_t period = channels / std::gcd(channels, lanes);
  if (offset != differing_offsets && (channels % lanes == 0 || period <= norm_threads)) {
    plan.lanes = lanes, plan.period = period;
  }
  // A period of several rows is not cut, so that each tile has all elements of its channels. Others are cut into runs
  // of a kilobyte and less, which leaves several rows to a block.
  const std::uint32_t widest = channels % plan.lanes != 0 ? norm_threads : plan.lanes == 1 ? norm_threads : 64;
  plan.tiles = (plan.period + widest - 1) / widest;
  plan.width = (plan.period + plan.tiles - 1) / plan.tiles;
  if (plan.tiles > 1) plan.width += plan.width % 2;  // whole sectors of 32 bytes
  plan.tiles = (plan.period + plan.width - 1) / plan.width;
  plan.slots = norm_threads / plan.width;

  // As many blocks as processors have room for, if that is many chunks of a sample, and otherwise twice as many, since
  // a few large chunks end at different times; unless a thread has little to do, or the sums would be much to write and
  // read. All numbers are measured on an H200.
  constexpr std::uint64_t blocks_of_a_processor = 4, many = 32, least_steps = 4, least_rows = 16;
  constexpr std::uint64_t most_elements = 1u << 30;
  const std::uint64_t rows_of_step = std::uint64_t{plan.slots} * plan.period * plan.lanes / channels;
  const std::uint64_t least = std::max(least_steps * rows_of_step, least_rows);
  const std::uint64_t others = samples * plan.tiles, room = blocks_of_a_processor * processors;
  const std::uint64_t wanted = ((room < many * others ? 2 * room : room) + others - 1) / others;
  const std::uint64_t chunks = std::max<std::uint64_t>(1, std::min(wanted, rows / least));
  std::uint64_t chunk_rows = (rows + chunks - 1) / chunks;
  chunk_rows = (chunk_rows + rows_of_step - 1) / rows_of_step * rows_of_step;
  chunk_rows = std::min(chunk_rows, std::max<std::uint64_t>(1, most_elements / channels / rows_of_step * rows_of_step));
  plan.chunk_rows = static_cast<std::uint32_t>(std::min(chunk_rows, rows));
  plan.chunks = static_cast<std::uint32_t>((rows + plan.chunk_rows - 1) / plan.chunk_rows);
  // A thread that merges has the sums of about four chunks.
  const std::uint32_t merged_channels = std::clamp(4 * norm_threads / plan.chunks, 2u, channels_of_banks(type));
  plan.merged_groups = std::max(1u, merged_channels / plan.channels_of_group());
  return plan;
}

/// Returns a plan of blocks that do all steps for a tile of whole groups, which they read once from memory and then
/// from the first-level cache. Where that is more than a block should read, the plan is in chunks.
inline NormPlan plan_norm(std::uint64_t samples, std::uint64_t rows, std::uint32_t channels, std::uint32_t groups,
                          NormType type, std::uint32_t offset, std::uint32_t processors) {
  const NormPlan in_chunks = plan_norm_in_chunks(samples, rows, channels, groups, type, offset, processors);
  NormPlan plan = in_chunks;
  constexpr std::uint64_t most_bytes = 32 << 10, sector_bytes = 32;
  const std::uint64_t bytes = bytes_of(type), bytes_of_vector = plan.lanes * bytes;
  // Whole groups in whole sectors, as many as have their sums in different banks of shared memory, if the rows are few.
  const std::uint64_t least = std::lcm(plan.channels_of_group() * bytes, sector_bytes) / bytes_of_vector;
  std::uint64_t width = std::max<std::uint64_t>(1, channels_of_banks(type) / (least * plan.lanes)) * least;
  if (rows > most_bytes) return in_chunks;
  if (width * bytes_of_vector * rows > most_bytes) width = least;
  // Only rows that begin with a vector can be cut.
  const bool can_cut = channels % plan.lanes == 0 && (plan.lanes == 1 || offset == 0);
  const bool is_cut = can_cut && width < plan.period;
  if (!is_cut) width = plan.period;
  if (width > norm_threads || rows * (is_cut ? width * bytes_of_vector : channels * bytes) > most_bytes) {
    return in_chunks;
  }
  plan.width = static_cast<std::uint32_t>(width);
  plan.tiles = (plan.period + plan.width - 1) / plan.width;
  plan.slots = norm_threads / plan.width;
  plan.chunk_rows = static_cast<std::uint32_t>(rows);
  plan.chunks = 1;
  const std::uint32_t groups_of_tile = is_cut ? plan.width * plan.lanes / plan.channels_of_group() : groups;
  plan.merged_groups = std::max(1u, channels_of_banks(type) / plan.channels_of_group());
  while (is_cut && groups_of_tile % plan.merged_groups != 0) --plan.merged_groups;
  plan.merges = (groups_of_tile + plan.merged_groups - 1) / plan.merged_groups;
  return plan;
}

/// Returns whether a grid may have so many blocks, and a chunk so many elements.
inline bool can_launch(const NormPlan& plan) {
  constexpr std::uint64_t most = (std::uint64_t{1} << 31) - 1;
  return plan.blocks() <= most && plan.merging_blocks() <= most &&
         std::uint64_t{plan.chunk_rows} * plan.channels < most;
}

/// What the kernels read and write. Statistics, scratch and sums are float, of float64 double; parameters and
/// running statistics have the type of the activation, or are float. What may be null is said.
struct NormArguments {
  NormPlan plan;
  const void *input, *grad;
  const void *weight, *bias, *residual;  ///< may be null
  void* out;                             ///< the output, or the input's gradient
  /// Of each sample and group, with a bias of the input of each channel, without it; the last may be null.
  void *mean, *rstd, *variance;
  void *running_mean, *running_var;  ///< of batch norm, or null: a forward updates them, `known_statistics` reads
  void* chunk_sums;                  ///< scratch: `plan.numbers_of_chunks(3)`, backward 2
  void* coefficients;                ///< scratch: 3 for each sample and channel, or null; backward 4
  void* sample_sums;                 ///< scratch of the backward: 2 for each sample and channel
  void *grad_weight, *grad_bias;     ///< may be null
  bool has_float_parameters;
  bool has_double_statistics;  ///< mean and rstd are double
  bool is_of_input;            ///< or the statistics are constants, for the backward
  NormActivation activation;
  bool has_float_gradients;  ///< of parameters, or they have the type of the activation
  double parameter;          ///< the ceiling of ReLU, or NaN; the slope of leaky ReLU
  double momentum, eps;
  const void* input_bias;  ///< added to the input, as a parameter; null where there are coefficients or whole steps
  const void* slopes;      ///< of leaky ReLU, as parameters, which are added to `parameter`; or null
  bool has_float_slopes, has_one_slope;
};

/// The kernels, in the order in which a forward and a backward launch them. That for gradients of parameters follows
/// them, then those that do all three steps of a forward or a backward, and that for running statistics. A forward
/// whose `coefficients` are null ends with the statistics; `normalise` alone then goes on with them.
enum class NormStep : std::uint8_t {
  chunk_moments,
  merge_moments,
  normalise,
  chunk_products,
  merge_products,
  gradient,
  parameter_gradients,
  whole_forward,
  whole_backward,
  known_statistics,
};
constexpr int norm_steps = 10;

/// Returns whether a kernel differs by what follows the norm.
constexpr bool has_followers(NormStep step) {
  return step == NormStep::normalise || step == NormStep::chunk_products || step == NormStep::gradient;
}

/// Returns whether a kernel does all steps, which only those of one type do.
constexpr bool does_all(NormStep step) { return step == NormStep::whole_forward || step == NormStep::whole_backward; }

/// Returns which of the kernels of a step is launched.
inline Follower follower_of(NormStep step, const NormArguments& arguments) {
  if (!has_followers(step)) return Follower::nothing;
  if (arguments.activation >= NormActivation::silu) return Follower::exponentials;
  if (arguments.slopes) return Follower::slopes;
  const bool is_alone = arguments.activation == NormActivation::none && !arguments.residual && arguments.coefficients;
  return is_alone ? Follower::nothing : Follower::lines;
}

/// Returns whether the blocks of a kernel read activations, by vectors where that is possible.
constexpr bool is_on_activations(NormStep step) {
  return step == NormStep::chunk_moments || step == NormStep::normalise || step == NormStep::chunk_products ||
         step == NormStep::gradient || step == NormStep::whole_forward || step == NormStep::whole_backward;
}

/// Returns the arguments of a kernel: to one on activations, statistics of each channel are those of groups of one.
inline NormArguments arguments_of_step(NormStep step, NormArguments arguments) {
  if (arguments.input_bias && is_on_activations(step)) arguments.plan.groups = arguments.plan.channels;
  return arguments;
}

inline std::uint32_t blocks_of(NormStep step, const NormPlan& plan) {
  if (is_on_activations(step)) return static_cast<std::uint32_t>(plan.blocks());
  if (step == NormStep::known_statistics) return (plan.channels + norm_threads - 1) / norm_threads;
  if (step != NormStep::parameter_gradients) return static_cast<std::uint32_t>(plan.merging_blocks());
  return (plan.channels + channels_of_parameter_block - 1) / channels_of_parameter_block;
}

/// The shared memory of a block, which is at most 32 KB.
inline std::uint32_t shared_bytes_of(NormStep step, const NormPlan& plan, NormType type) {
  const std::uint32_t real = type == NormType::float64 ? 8 : 4, values = plan.slots * plan.width * plan.lanes;
  switch (step) {
    case NormStep::chunk_moments: return 4 * values * real;
    case NormStep::chunk_products: return 2 * values * real;
    case NormStep::merge_moments: return 4 * norm_threads * real;
    case NormStep::whole_forward: return 4 * std::max(values, norm_threads) * real;
    case NormStep::whole_backward: return 2 * std::max(values, norm_threads) * real;
    case NormStep::merge_products:
    case NormStep::parameter_gradients: return 2 * norm_threads * real;
    default: return 0;
  }
}

}  // namespace nhwc::cuda
