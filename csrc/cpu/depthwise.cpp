#include "cpu/depthwise.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "cpu/dispatch.h"

namespace nhwc::cpu {
namespace {

/// What depends on the dtype. Numbers are floats, or doubles for doubles.
struct Kernels {
  const DepthwiseKernels& depthwise;
  NumberTransposes transposes;
  at::ScalarType number;
  int64_t element_size;

  int64_t number_size() const { return number == at::kDouble ? 8 : 4; }
};

Kernels kernels_of(at::ScalarType type) {
  return {of_type(depthwise_kernels(), type), number_transposes(type), type == at::kDouble ? at::kDouble : at::kFloat,
          static_cast<int64_t>(c10::elementSize(type))};
}

/// The registers of the channels. The last one overlaps the one before if the channels do not fill it, and groups of
/// them fill cache lines, so that no two threads write to one.
class Registers {
 public:
  Registers(const Kernels& kernels, int64_t channels) : channels_(channels), lanes_(kernels.depthwise.lanes) {
    constexpr int64_t line = 64;
    per_group_ = std::max<int64_t>(1, line / (lanes_ * kernels.element_size));
  }

  int64_t count() const { return (channels_ + lanes_ - 1) / lanes_; }
  int64_t groups() const { return std::max<int64_t>(1, channels_ / (per_group_ * lanes_)); }
  int64_t begin(int64_t group) const { return group * per_group_; }
  int64_t end(int64_t group) const { return group + 1 == groups() ? count() : begin(group + 1); }
  int64_t first_channel(int64_t index) const {
    return std::max<int64_t>(0, std::min(index * lanes_, channels_ - lanes_));
  }
  int64_t channels() const { return std::min(channels_, lanes_); }  // of each register

 private:
  int64_t channels_, lanes_, per_group_;
};

/// Cuts the destinations of a sample into blocks whose sources fit into a second-level cache.
class Blocks {
 public:
  /// Makes more and smaller blocks if there are fewer than `wanted`.
  Blocks(const DepthwiseCorrelation& correlation, int64_t wanted) : correlation_(correlation) {
    constexpr int64_t most_positions = 4096;
    constexpr std::array<int64_t, 3> fewest{1, 1, 4};  // rows are better long
    for (int a = 0; a < 3; ++a) size_[a] = correlation.axes[a].count;
    while (positions() > most_positions || count() < wanted) {
      int longest = -1;
      for (int a = 0; a < 3; ++a) {
        // What two neighbouring blocks read twice should not be most of what they read.
        const bool is_short = size_[a] <= fewest[a] || size_[a] <= reach(a) / 2 + 1;
        if (!is_short && (longest < 0 || size_[a] / fewest[a] > size_[longest] / fewest[longest])) longest = a;
      }
      if (longest < 0) break;
      const int64_t parts = count(longest) + 1;
      size_[longest] = std::min(size_[longest] - 1, (correlation.axes[longest].count + parts - 1) / parts);
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
  int64_t count(int a) const { return (correlation_.axes[a].count + size_[a] - 1) / size_[a]; }
  int64_t reach(int a) const {
    return std::max<int64_t>(0, correlation_.axes[a].taps - 1) * correlation_.axes[a].dilation;
  }
  int64_t positions() const {
    int64_t product = correlation_.parts;
    for (int a = 0; a < 3; ++a) product *= (size_[a] - 1) * correlation_.axes[a].stride + reach(a) + 1;
    return product;
  }

  const DepthwiseCorrelation& correlation_;
  int64_t size_[3];
};

/// Memory of a thread, aligned to cache lines.
at::DataPtr scratch_for(const Kernels& kernels, const DepthwiseCorrelation& correlation, DepthwiseBlock block) {
  return c10::GetCPUAllocator()->allocate(kernels.depthwise.scratch_size(correlation, block) * kernels.number_size());
}

int64_t source_elements(const DepthwiseCorrelation& c) {
  return c.axes[0].source * c.axes[1].source * c.axes[2].source * c.source_channels;
}

int64_t destination_elements(const DepthwiseCorrelation& c) {
  return c.axes[0].destination * c.axes[1].destination * c.axes[2].destination * c.destination_channels;
}

int64_t taps_of(const ConvolutionSizes& sizes) { return sizes.kernel[0] * sizes.kernel[1] * sizes.kernel[2]; }

DepthwiseCorrelation forward_correlation(const ConvolutionSizes& sizes) {
  DepthwiseCorrelation correlation{{}, sizes.groups, sizes.groups * sizes.outputs, sizes.outputs, 1};
  for (int a = 0; a < 3; ++a) {
    correlation.axes[a] = {sizes.input[a],    sizes.output[a], sizes.kernel[a],   0, 1, sizes.output[a],
                           -sizes.padding[a], sizes.stride[a], sizes.dilation[a], 0, 1, sizes.kernel[a]};
  }
  return correlation;
}

/// Returns the inputs `phase + i * stride` of an axis as sums of gradients: the taps that see them are a stride, or a
/// divisor of it, apart, and their gradients are without a stride. Taps are in descending order, gradients ascend.
DepthwiseAxis gradient_axis(const ConvolutionSizes& sizes, int a, int64_t phase) {
  const int64_t stride = sizes.stride[a], dilation = sizes.dilation[a];
  const int64_t shifted = phase + sizes.padding[a], tap_step = stride / std::gcd(stride, dilation);
  int64_t taps = 0, last_tap = 0;
  for (int64_t tap = 0; tap < sizes.kernel[a]; ++tap) {
    if ((shifted - tap * dilation) % stride == 0) ++taps, last_tap = tap;
  }
  DepthwiseAxis axis{};
  axis.source = sizes.output[a], axis.destination = sizes.input[a], axis.kernel = sizes.kernel[a];
  axis.first = phase, axis.step = stride, axis.count = (sizes.input[a] - phase + stride - 1) / stride;
  axis.begin = (shifted - last_tap * dilation) / stride, axis.stride = 1, axis.dilation = dilation * tap_step / stride;
  axis.first_tap = last_tap, axis.tap_step = -tap_step, axis.taps = taps;
  return axis;
}

/// Returns `[rows, columns]` as numbers, `[columns, rows]`, followed by as many numbers as a register has.
at::Tensor transposed_numbers(const Kernels& kernels, const at::Tensor& from, int64_t rows, int64_t columns) {
  at::Tensor numbers = at::empty({rows * columns + kernels.depthwise.lanes}, from.options().dtype(kernels.number));
  kernels.transposes.to_numbers(from.const_data_ptr(), numbers.mutable_data_ptr(), 1, rows, columns, false);
  return numbers;
}

void correlate(const Kernels& kernels, const DepthwiseCorrelation& correlation, int64_t samples,
               const at::Tensor& source, const at::Tensor& weight, const at::Tensor& bias,
               const at::Tensor& destination) {
  const Registers registers(kernels, correlation.destination_channels);
  const int64_t threads = at::in_parallel_region() ? 1 : at::get_num_threads(), per_thread = 4;
  const int64_t wanted = threads == 1 ? 1 : per_thread * threads / (samples * registers.groups()) + 1;
  const Blocks blocks(correlation, wanted);
  const auto* from = static_cast<const char*>(source.const_data_ptr());
  auto* to = static_cast<char*>(destination.mutable_data_ptr());
  const void* bias_numbers = bias.defined() ? bias.const_data_ptr() : nullptr;
  at::parallel_for(0, samples * blocks.count() * registers.groups(), 1, [&](int64_t begin, int64_t end) {
    const at::DataPtr scratch = scratch_for(kernels, correlation, blocks[0]);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t group = task % registers.groups(), index = task / registers.groups();
      const int64_t sample = index / blocks.count();
      DepthwiseBlock block = blocks[index % blocks.count()];
      block.channels = registers.channels();
      for (int64_t i = registers.begin(group); i < registers.end(group); ++i) {
        block.channel = registers.first_channel(i);
        kernels.depthwise.correlate(correlation, block,
                                    from + sample * source_elements(correlation) * kernels.element_size,
                                    to + sample * destination_elements(correlation) * kernels.element_size,
                                    weight.const_data_ptr(), bias_numbers, scratch.get());
      }
    }
  });
}

/// Merges the sums of all ranges, `[ranges, registers, taps, lanes]`, in their order, into `[taps, channels]`.
template <typename Number>
void merge(const at::Tensor& sums, const Registers& registers, int64_t taps, int64_t channels, int64_t lanes,
           const at::Tensor& merged) {
  const Number* from = sums.const_data_ptr<Number>();
  Number* to = merged.mutable_data_ptr<Number>();
  const int64_t of_range = registers.count() * taps * lanes, ranges = sums.numel() / of_range;
  for (int64_t i = 0; i < registers.count(); ++i) {
    for (int64_t tap = 0; tap < taps; ++tap) {
      const Number* first = from + (i * taps + tap) * lanes;
      Number* out = to + tap * channels + registers.first_channel(i);
      for (int64_t lane = 0; lane < registers.channels(); ++lane) {
        Number sum = first[lane];
        for (int64_t range = 1; range < ranges; ++range) sum += first[range * of_range + lane];
        out[lane] = sum;
      }
    }
  }
}

}  // namespace

void depthwise_forward(const ConvolutionSizes& sizes, const at::Tensor& input, const at::Tensor& weight,
                       const at::Tensor& bias, const at::Tensor& out) {
  if (out.numel() == 0) return;
  const Kernels kernels = kernels_of(input.scalar_type());
  const DepthwiseCorrelation correlation = forward_correlation(sizes);
  const int64_t channels = correlation.destination_channels;
  correlate(kernels, correlation, sizes.samples, input, transposed_numbers(kernels, weight, channels, taps_of(sizes)),
            bias.defined() ? transposed_numbers(kernels, bias, channels, 1) : at::Tensor(), out);
}

void depthwise_input_gradient(const ConvolutionSizes& sizes, const at::Tensor& grad, const at::Tensor& weight,
                              const at::Tensor& grad_input) {
  if (grad_input.numel() == 0) return;
  const Kernels kernels = kernels_of(grad.scalar_type());
  const at::Tensor numbers = transposed_numbers(kernels, weight, sizes.groups, sizes.outputs * taps_of(sizes));
  DepthwiseCorrelation correlation{{}, sizes.groups * sizes.outputs, sizes.groups, 1, sizes.outputs};
  const auto phases = [&](int a) { return std::min(sizes.stride[a], sizes.input[a]); };
  for (int64_t depth = 0; depth < phases(0); ++depth) {
    for (int64_t height = 0; height < phases(1); ++height) {
      for (int64_t width = 0; width < phases(2); ++width) {
        correlation.axes[0] = gradient_axis(sizes, 0, depth);
        correlation.axes[1] = gradient_axis(sizes, 1, height);
        correlation.axes[2] = gradient_axis(sizes, 2, width);
        correlate(kernels, correlation, sizes.samples, grad, numbers, {}, grad_input);
      }
    }
  }
}

void depthwise_weight_gradient(const ConvolutionSizes& sizes, const at::Tensor& grad, const at::Tensor& input,
                               const at::Tensor& grad_weight, const at::Tensor& grad_bias) {
  if (grad_weight.numel() == 0) return;
  const Kernels kernels = kernels_of(grad.scalar_type());
  const DepthwiseCorrelation correlation = forward_correlation(sizes);
  const int64_t channels = correlation.destination_channels, taps = taps_of(sizes), lanes = kernels.depthwise.lanes;
  const Registers registers(kernels, channels);
  const at::TensorOptions options = grad.options().dtype(kernels.number);
  at::Tensor merged = at::zeros({(taps + 1) * channels}, options);
  if (grad.numel() != 0) {
    // Neither blocks nor ranges of them depend on the number of threads, so that sums do not.
    constexpr int64_t wanted = 16;
    const Blocks blocks(correlation, wanted / (sizes.samples * registers.groups()) + 1);
    const int64_t items = sizes.samples * blocks.count();
    const int64_t ranges = std::min(items, wanted / registers.groups() + 1);
    const at::Tensor sums = at::zeros({ranges * registers.count() * (taps + 1) * lanes}, options);
    const auto *from = static_cast<const char*>(input.const_data_ptr()),
               *from_grad = static_cast<const char*>(grad.const_data_ptr());
    auto* to = static_cast<char*>(sums.mutable_data_ptr());
    at::parallel_for(0, ranges * registers.groups(), 1, [&](int64_t begin, int64_t end) {
      const at::DataPtr scratch = scratch_for(kernels, correlation, blocks[0]);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t range = task / registers.groups(), group = task % registers.groups();
        for (int64_t item = items * range / ranges; item < items * (range + 1) / ranges; ++item) {
          const int64_t sample = item / blocks.count();
          DepthwiseBlock block = blocks[item % blocks.count()];
          block.channels = registers.channels();
          for (int64_t i = registers.begin(group); i < registers.end(group); ++i) {
            block.channel = registers.first_channel(i);
            kernels.depthwise.add_weight_gradient(
                correlation, block, from + sample * source_elements(correlation) * kernels.element_size,
                from_grad + sample * destination_elements(correlation) * kernels.element_size,
                to + (range * registers.count() + i) * (taps + 1) * lanes * kernels.number_size(), scratch.get());
          }
        }
      }
    });
    if (kernels.number == at::kDouble) {
      merge<double>(sums, registers, taps + 1, channels, lanes, merged);
    } else {
      merge<float>(sums, registers, taps + 1, channels, lanes, merged);
    }
  }
  kernels.transposes.from_numbers(merged.const_data_ptr(), grad_weight.mutable_data_ptr(), 1, taps, channels, false);
  if (grad_bias.defined()) grad_bias.copy_(merged.narrow(0, taps * channels, channels));
}

}  // namespace nhwc::cpu
