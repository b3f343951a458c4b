// A task is a block of the results of a sample, and a group of registers of channels; all channels where something
// follows, whose rows then are in a cache. Blocks and ranges of them for sums depend on the sizes alone, and not on the
// number of threads, so the results do not either.
#include "cpu/depthwise.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cstring>

#include "cpu/dispatch.h"
#include "cpu/work/ranges.h"
#include "cpu/work/rows.h"

namespace nhwc::cpu {
namespace {

/// What depends on the dtype. Numbers are floats, or doubles for doubles.
struct DepthwiseType {
  const DepthwiseKernels& kernels;
  NumberTransposes transposes;
  at::ScalarType number;
  int64_t element_bytes, number_bytes;

  explicit DepthwiseType(at::ScalarType type)
      : kernels(of_type(level_kernels().depthwise, type)),
        transposes(number_transposes(type)),
        number(type == at::kDouble ? at::kDouble : at::kFloat),
        element_bytes(static_cast<int64_t>(c10::elementSize(type))),
        number_bytes(static_cast<int64_t>(c10::elementSize(number))) {}
};

/// The registers of the channels. The last one overlaps the one before if the channels do not fill it, and groups of
/// them fill cache lines, so that no two threads write to one.
class Registers {
 public:
  Registers(const DepthwiseType& type, int64_t channels) : channels_(channels), lanes_(type.kernels.lanes) {
    constexpr int64_t line = 64;
    per_group_ = std::max<int64_t>(1, line / (lanes_ * type.element_bytes));
  }

  int64_t count() const { return divide_up(channels_, lanes_); }
  int64_t groups() const { return std::max<int64_t>(1, channels_ / (per_group_ * lanes_)); }
  int64_t first_channel(int64_t index) const {
    return std::max<int64_t>(0, std::min(index * lanes_, channels_ - lanes_));
  }
  int64_t channels() const { return std::min(channels_, lanes_); }  // of each register

  /// Calls `work(block, index)` for the registers of a group, with their channels in the block.
  template <typename Work>
  void for_each(int64_t group, DepthwiseBlock block, const Work& work) const {
    const int64_t end = group + 1 == groups() ? count() : (group + 1) * per_group_;
    block.channels = channels();
    for (int64_t index = group * per_group_; index < end; ++index) {
      block.channel = first_channel(index);
      work(block, index);
    }
  }

 private:
  int64_t channels_, lanes_, per_group_;
};

/// Cuts the results of a sample into blocks whose sources fit into a second-level cache.
class Blocks {
 public:
  /// Makes more and smaller blocks if there are fewer than `enough`.
  Blocks(const DepthwiseCorrelation& correlation, int64_t enough) : correlation_(correlation) {
    for (int a = 0; a < 3; ++a) size_[a] = correlation.axes[a].count;
    while (positions() > most_positions || count() < enough) {
      int longest = -1;
      for (int a = 0; a < 3; ++a) {
        if (is_divisible(a) && (longest < 0 || size_[a] / fewest[a] > size_[longest] / fewest[longest])) longest = a;
      }
      if (longest < 0) break;
      const int64_t parts = count(longest) + 1;
      size_[longest] = std::min(size_[longest] - 1, divide_up(correlation.axes[longest].count, parts));
    }
  }

  int64_t count() const { return count(0) * count(1) * count(2); }

  /// Returns a block without its channels. The first is a largest one.
  DepthwiseBlock operator[](int64_t index) const {
    DepthwiseBlock block{};
    for (int a = 2; a >= 0; --a) {
      block.begin[a] = index % count(a) * size_[a];
      block.size[a] = std::min(size_[a], correlation_.axes[a].count - block.begin[a]);
      index /= count(a);
    }
    return block;
  }

 private:
  static constexpr int64_t most_positions = 4096;
  static constexpr int64_t fewest[] = {1, 1, 4};  // rows are better long

  int64_t count(int a) const { return divide_up(correlation_.axes[a].count, size_[a]); }
  PackedAxis packed(int a) const { return packed_axis(correlation_.axes[a], size_[a]); }
  int64_t positions() const {
    return correlation_.parts * packed(0).positions() * packed(1).positions() * packed(2).positions();
  }

  /// Returns whether smaller blocks are worthwhile: not if their neighbours read most of what they read, too.
  bool is_divisible(int a) const {
    const TapAxis& axis = correlation_.axes[a];
    const int64_t shared = std::max<int64_t>(0, axis.taps - 1) * axis.dilation;
    const bool would_be_by_tap = packed_axis(axis, divide_up(size_[a], 2)).segments > 1;
    const bool may_be_short = positions() > most_positions && would_be_by_tap;
    return size_[a] > fewest[a] && (may_be_short || size_[a] > shared / 2 + 1);
  }

  const DepthwiseCorrelation& correlation_;
  int64_t size_[3];
};

const char* sample_of(const at::Tensor& activation, int64_t sample) {
  return static_cast<const char*>(activation.const_data_ptr()) + activation.nbytes() / activation.size(0) * sample;
}

DepthwiseCorrelation forward_correlation(const ConvolutionSizes& sizes) {
  return {.axes = {forward_axis(sizes, 0), forward_axis(sizes, 1), forward_axis(sizes, 2)},
          .source_channels = sizes.groups,
          .result_channels = sizes.groups * sizes.outputs,
          .repeats = sizes.outputs,
          .parts = 1};
}

/// Returns the multiply-adds of a sample.
int64_t products_of(const DepthwiseCorrelation& correlation) {
  int64_t products = correlation.result_channels * correlation.parts;
  for (const TapAxis& axis : correlation.axes) products *= axis.count * axis.taps;
  return products;
}

/// Returns `[rows, columns]` as numbers, `[columns, rows]`, followed by as many numbers as a register has.
at::Tensor transposed_numbers(const DepthwiseType& type, const at::Tensor& from, int64_t rows, int64_t columns) {
  at::Tensor numbers = at::empty({rows * columns + type.kernels.lanes}, from.options().dtype(type.number));
  type.transposes.to_numbers(from.const_data_ptr(), numbers.mutable_data_ptr(), 1, rows, columns, false);
  return numbers;
}

void correlate(const DepthwiseType& type, const DepthwiseCorrelation& correlation, const at::Tensor& source,
               const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& result, const Output& output = {}) {
  constexpr int64_t tasks_of_thread = 4;
  const bool finishes = !output.is_empty();
  const int64_t channels = correlation.result_channels;
  const Registers registers(type, channels);
  const int64_t groups_of_task = finishes ? registers.groups() : 1, parts = registers.groups() / groups_of_task;
  const int64_t samples = result.size(0), products = samples * products_of(correlation);
  const int64_t threads = threads_worth(products);
  const int64_t enough = threads == 1 ? 1 : tasks_of_thread * threads / (samples * parts) + 1;
  const Blocks blocks(correlation,
                      finishes ? std::max(enough, divide_up(result.numel() / samples, most_finished)) : enough);
  const int64_t tasks = samples * blocks.count() * parts;
  const int64_t scratch_bytes = type.kernels.scratch_size(correlation, blocks[0]) * type.number_bytes;
  const void* bias_numbers = bias.defined() ? bias.const_data_ptr() : nullptr;
  for_each_task(tasks, products / tasks, scratch_bytes, [&](int64_t task, char* scratch) {
    const int64_t index = task / parts, sample = index / blocks.count(), first = task % parts * groups_of_task;
    const DepthwiseBlock all = blocks[index % blocks.count()];
    for (int64_t group = first; group < first + groups_of_task; ++group) {
      registers.for_each(group, all, [&](const auto& block, int64_t) {
        type.kernels.correlate(correlation, block, sample_of(source, sample),
                               const_cast<char*>(sample_of(result, sample)), weight.const_data_ptr(), bias_numbers,
                               scratch);
      });
    }
    for (int64_t row = 0; finishes && row < all.size[0] * all.size[1]; ++row) {
      const int64_t plane = all.begin[0] + row / all.size[1], line = all.begin[1] + row % all.size[1];
      const int64_t position =
          (plane * correlation.axes[1].results + line) * correlation.axes[2].results + all.begin[2];
      output.finish(result, sample_of(result, sample) + position * channels * type.element_bytes,
                    all.size[2] * channels);
    }
  });
}

/// Returns the sums of the gradients of the weight and then of the bias, `[taps + 1, channels]`, as numbers.
at::Tensor weight_sums(const DepthwiseType& type, const DepthwiseCorrelation& correlation, int64_t taps,
                       const at::Tensor& grad, const at::Tensor& input) {
  const Registers registers(type, correlation.result_channels);
  const int64_t samples = grad.size(0), lanes = type.kernels.lanes, row_bytes = lanes * type.number_bytes;
  const Blocks blocks(correlation, enough_tasks / (samples * registers.groups()) + 1);
  const int64_t items = samples * blocks.count();
  const int64_t ranges = std::min(items, enough_tasks / registers.groups() + 1), tasks = ranges * registers.groups();
  const at::TensorOptions options = grad.options().dtype(type.number);
  const at::Tensor sums = at::zeros({ranges, registers.count(), taps + 1, lanes}, options);
  auto* to = static_cast<char*>(sums.mutable_data_ptr());
  const int64_t scratch_bytes = type.kernels.scratch_size(correlation, blocks[0]) * type.number_bytes;
  for_each_task(tasks, samples * products_of(correlation) / tasks, scratch_bytes, [&](int64_t task, char* scratch) {
    const int64_t range = task / registers.groups();
    const auto [begin, end] = equal_part(items, ranges, range);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t sample = item / blocks.count();
      registers.for_each(task % registers.groups(), blocks[item % blocks.count()], [&](const auto& block, int64_t i) {
        type.kernels.add_weight_gradient(correlation, block, sample_of(input, sample), sample_of(grad, sample),
                                         to + (range * registers.count() + i) * (taps + 1) * row_bytes, scratch);
      });
    }
  });
  add_up_parts_of(type.number, to, ranges, registers.count() * (taps + 1) * lanes);
  const at::Tensor merged = at::empty({taps + 1, correlation.result_channels}, options);
  auto* out = static_cast<char*>(merged.mutable_data_ptr());
  for (int64_t row = 0; row < registers.count() * (taps + 1); ++row) {
    const int64_t first = row % (taps + 1) * correlation.result_channels + registers.first_channel(row / (taps + 1));
    std::memcpy(out + first * type.number_bytes, to + row * row_bytes, registers.channels() * type.number_bytes);
  }
  return merged;
}

}  // namespace

void depthwise_forward(const ConvolutionSizes& sizes, const at::Tensor& input, const at::Tensor& weight,
                       const at::Tensor& bias, const at::Tensor& out, const Output& output) {
  if (out.numel() == 0) return;
  const DepthwiseType type(input.scalar_type());
  const DepthwiseCorrelation correlation = forward_correlation(sizes);
  const int64_t channels = correlation.result_channels;
  correlate(type, correlation, input, transposed_numbers(type, weight, channels, sizes.taps()),
            bias.defined() ? transposed_numbers(type, bias, channels, 1) : at::Tensor(), out, output);
}

void depthwise_input_gradient(const ConvolutionSizes& sizes, const at::Tensor& grad, const at::Tensor& weight,
                              const at::Tensor& grad_input) {
  if (grad_input.numel() == 0) return;
  const DepthwiseType type(grad.scalar_type());
  const at::Tensor numbers = transposed_numbers(type, weight, sizes.groups, sizes.outputs * sizes.taps());
  const auto phases = [&](int a) { return std::min(sizes.stride[a], sizes.input[a]); };
  for (int64_t phase = 0; phase < phases(0) * phases(1) * phases(2); ++phase) {
    const DepthwiseCorrelation correlation{
        .axes = {gradient_axis(sizes, 0, phase / phases(2) / phases(1)),
                 gradient_axis(sizes, 1, phase / phases(2) % phases(1)), gradient_axis(sizes, 2, phase % phases(2))},
        .source_channels = sizes.groups * sizes.outputs,
        .result_channels = sizes.groups,
        .repeats = 1,
        .parts = sizes.outputs};
    correlate(type, correlation, grad, numbers, {}, grad_input);
  }
}

void depthwise_weight_gradient(const ConvolutionSizes& sizes, const at::Tensor& grad, const at::Tensor& input,
                               const at::Tensor& grad_weight, const at::Tensor& grad_bias) {
  if (grad_weight.numel() == 0) return;
  const DepthwiseType type(grad.scalar_type());
  const DepthwiseCorrelation correlation = forward_correlation(sizes);
  const int64_t channels = correlation.result_channels, taps = sizes.taps();
  const at::Tensor sums = grad.numel() != 0 ? weight_sums(type, correlation, taps, grad, input)
                                            : at::zeros({taps + 1, channels}, grad.options().dtype(type.number));
  type.transposes.from_numbers(sums.const_data_ptr(), grad_weight.mutable_data_ptr(), 1, taps, channels, false);
  if (grad_bias.defined()) grad_bias.copy_(sums[taps]);
}

}  // namespace nhwc::cpu
