// A block is a box of output positions and the input under their taps. Both are packed: the input into planes of a few
// channels, the gradient into groups of a few. In a plane, each tap of the kernel is the same stream of numbers from
// another offset on, so that the block's part of the gradient is outer products of streams, without a copy for each
// tap.
//
// A task is a part of the weight, small enough that its sums and a block of its channels fit into a cache, and a range
// of the blocks. Tasks depend on the sizes alone, and not on the number of threads, so the results do not either.
#include "cpu/weight_gradient.h"

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/dispatch.h"

namespace nhwc::cpu {
namespace {

// For caches of 32 KiB and 512 KiB. Not the sizes of this CPU, on which the results would then depend.
constexpr int64_t positions_of_block = 256, most_channels = 128, most_sums = 1 << 16;
constexpr int64_t channels_of_groups = 64;  // of several small groups in one task
constexpr int64_t enough_tasks = 16, blocks_worth_a_range = 4;
constexpr int64_t products_worth_a_thread = 1 << 19;

const WeightGradientKernels& kernels_of(at::ScalarType type) {
  const WeightGradientKernelsByType& kernels = weight_gradient_kernels();
  switch (type) {
    case at::kDouble: return kernels.of_double;
    case at::kFloat: return kernels.of_float;
    case at::kHalf: return kernels.of_half;
    default: TORCH_INTERNAL_ASSERT(type == at::kBFloat16, "a kernel for ", type); return kernels.of_bfloat16;
  }
}

int64_t quotient(int64_t of, int64_t by) { return (of + by - 1) / by; }
int64_t multiple(int64_t of, int64_t by) { return quotient(of, by) * by; }

/// Items in parts of one size, except for the last.
struct Split {
  int64_t count, size, parts;
  Split(int64_t count, int64_t most, int64_t unit = 1)
      : count(count), size(multiple(quotient(count, quotient(count, most)), unit)), parts(quotient(count, size)) {}
  int64_t begin(int64_t part) const { return part * size; }
  int64_t size_of(int64_t part) const { return std::min(size, count - part * size); }
};

/// One axis of a block: some outputs, and the positions of the input that are packed for them. These are all between
/// the first and the last or, where that is fewer, those of each tap.
struct Axis {
  int64_t input, kernel, stride, padding, dilation;
  Split outputs;

  int64_t all() const { return (outputs.size - 1) * stride + (kernel - 1) * dilation + 1; }
  bool is_by_tap() const { return kernel * outputs.size < all(); }
  int64_t segments() const { return is_by_tap() ? kernel : 1; }
  int64_t length() const { return is_by_tap() ? outputs.size : all(); }  // of a segment
  int64_t positions() const { return segments() * length(); }
  int64_t step() const { return is_by_tap() ? 1 : stride; }                   // from output to output, in positions
  int64_t tap_step() const { return is_by_tap() ? outputs.size : dilation; }  // from tap to tap, in positions
  int64_t input_step() const { return is_by_tap() ? stride : 1; }             // from position to position, in the input
  int64_t input_of(int64_t block, int64_t position) const {
    return outputs.begin(block) * stride - padding + position / length() * dilation +
           position % length() * input_step();
  }
};

/// A part of the weight: the channels are those of each group.
struct Task {
  int64_t first_group, groups, first_input, inputs, first_output, outputs;
};

/// The samples, depth, height and width of a block, as indices of blocks.
struct Block {
  int64_t index[4];
};

class WeightGradient {
 public:
  WeightGradient(const ConvolutionSizes& sizes, const at::Tensor& grad, const at::Tensor& input,
                 const at::Tensor& grad_weight, const at::Tensor& grad_bias);
  void compute() const;

 private:
  Task task(int64_t index) const;
  Block block(int64_t index) const;
  int64_t sums_of(const Task& task) const { return task.groups * outputs_padded_ * (row_ + 1); }
  void add(const Task& task, int64_t range, char* scratch, char* sums) const;
  void pack_input(const Task& task, const Block& block, char* to) const;
  void pack_grad(const Task& task, const Block& block, char* to) const;
  void write(const Task& task, char* sums) const;

  const ConvolutionSizes& sizes_;
  const WeightGradientKernels& kernels_;
  const int64_t element_, number_;  // bytes
  const char *const grad_, *const grad_end_, *const input_, *const input_end_;
  char *const grad_weight_, *const grad_bias_;
  const int64_t taps_;

  std::vector<Axis> axes_;                    // samples, depth, height and width
  Split groups_, inputs_, outputs_;           // of tasks
  int64_t width_ = 0;                         // channels of a plane
  int64_t run_taps_ = 1, run_registers_ = 1;  // taps that are neighbours in memory, and the registers that they fill
  int64_t plane_ = 0, capacity_ = 1;          // numbers of a plane, output positions of a block
  std::vector<int64_t> offsets_;              // of all registers of a group
  int64_t outputs_padded_ = 0, row_ = 0;      // outputs of a task's group, numbers of the sums of one of them
  Split blocks_{1, 1};                        // of ranges
};

/// Returns how many channels of input and of output a task has, so that the sums of all taps fit into a cache.
int64_t channels_of_task(int64_t taps, int64_t least) {
  const auto side = static_cast<int64_t>(std::sqrt(static_cast<double>(most_sums) / static_cast<double>(taps)));
  return std::clamp(side / least * least, least, std::max(least, most_channels));
}

WeightGradient::WeightGradient(const ConvolutionSizes& sizes, const at::Tensor& grad, const at::Tensor& input,
                               const at::Tensor& grad_weight, const at::Tensor& grad_bias)
    : sizes_(sizes),
      kernels_(kernels_of(input.scalar_type())),
      element_(input.element_size()),
      number_(std::max<int64_t>(element_, sizeof(float))),
      grad_(static_cast<const char*>(grad.const_data_ptr())),
      grad_end_(grad_ + grad.numel() * element_),
      input_(static_cast<const char*>(input.const_data_ptr())),
      input_end_(input_ + input.numel() * element_),
      grad_weight_(static_cast<char*>(grad_weight.mutable_data_ptr())),
      grad_bias_(grad_bias.defined() ? static_cast<char*>(grad_bias.mutable_data_ptr()) : nullptr),
      taps_(sizes.kernel[0] * sizes.kernel[1] * sizes.kernel[2]),
      groups_(sizes.groups, std::max<int64_t>(1, channels_of_groups / std::max(sizes.inputs, sizes.outputs))),
      inputs_(sizes.inputs, channels_of_task(taps_, 2 * kernels_.lanes), kernels_.lanes),
      outputs_(sizes.outputs, channels_of_task(taps_, kernels_.outputs_at_once), kernels_.outputs_at_once) {
  for (int axis = 2; axis >= 0; --axis) {
    const Split outputs(sizes.output[axis], std::max<int64_t>(1, positions_of_block / capacity_));
    axes_.push_back({sizes.input[axis], sizes.kernel[axis], sizes.stride[axis], sizes.padding[axis],
                     sizes.dilation[axis], outputs});
    capacity_ *= outputs.size;
  }
  const Split samples(sizes.samples, std::max<int64_t>(1, positions_of_block / capacity_));
  axes_.push_back({sizes.samples, 1, 1, 0, 1, samples});
  capacity_ *= samples.size;
  std::reverse(axes_.begin(), axes_.end());

  // Channels are in planes of one register, or all in one plane: then the taps of a kernel's row are neighbours, and
  // may fill fewer registers.
  const int64_t lanes = kernels_.lanes, channels = sizes.inputs, row_taps = sizes.kernel[2];
  const bool are_neighbours = sizes.dilation[2] == 1 && !axes_[3].is_by_tap();
  const int64_t together = are_neighbours ? row_taps : 1;
  width_ = lanes;
  if (inputs_.parts == 1 && channels < 4 * lanes &&
      quotient(together * channels, lanes) < together * quotient(channels, lanes)) {
    width_ = channels;
    run_taps_ = together;
    run_registers_ = quotient(together * channels, lanes);
  }
  const int64_t planes = quotient(std::min(inputs_.size, channels), width_);
  int64_t step[4] = {0, 0, 0, width_};  // numbers from position to position
  for (int axis = 2; axis >= 0; --axis) step[axis] = step[axis + 1] * axes_[axis + 1].positions();
  plane_ = step[0] * axes_[0].positions();
  for (int64_t plane = 0; plane < planes; ++plane) {
    for (int64_t tap = 0; tap < taps_; tap += run_taps_) {
      const int64_t d = tap / row_taps / sizes.kernel[1], h = tap / row_taps % sizes.kernel[1], w = tap % row_taps;
      const int64_t first = plane * plane_ + d * axes_[1].tap_step() * step[1] + h * axes_[2].tap_step() * step[2] +
                            w * axes_[3].tap_step() * step[3];
      for (int64_t r = 0; r < run_registers_; ++r) offsets_.push_back(first + r * lanes);
    }
  }
  row_ = static_cast<int64_t>(offsets_.size()) * lanes;
  outputs_padded_ = multiple(std::min(outputs_.size, sizes.outputs), kernels_.outputs_at_once);

  int64_t blocks = 1;
  for (const Axis& axis : axes_) blocks *= axis.outputs.parts;
  const int64_t tasks = groups_.parts * inputs_.parts * outputs_.parts;
  blocks_ = Split(blocks, std::max(blocks_worth_a_range, quotient(blocks, quotient(enough_tasks, tasks))));
}

Task WeightGradient::task(int64_t index) const {
  const int64_t outputs = index % outputs_.parts, inputs = index / outputs_.parts % inputs_.parts,
                groups = index / outputs_.parts / inputs_.parts;
  return {groups_.begin(groups),   groups_.size_of(groups), inputs_.begin(inputs),
          inputs_.size_of(inputs), outputs_.begin(outputs), outputs_.size_of(outputs)};
}

Block WeightGradient::block(int64_t index) const {
  Block block;
  for (int axis = 3; axis >= 0; --axis) {
    block.index[axis] = index % axes_[axis].outputs.parts;
    index /= axes_[axis].outputs.parts;
  }
  return block;
}

void WeightGradient::pack_input(const Task& task, const Block& block, char* to) const {
  const int64_t channels = sizes_.groups * sizes_.inputs, position_bytes = width_ * number_;
  const Axis& row = axes_[3];
  const auto pack_row = [&](const char* from) {
    for (int64_t segment = 0; segment < row.segments(); ++segment) {
      // Of these positions, the ones from `begin` to `end` are in the input.
      const int64_t first = row.input_of(block.index[3], segment * row.length()), step = row.input_step();
      const int64_t begin = std::clamp<int64_t>(quotient(-first, step), 0, row.length());
      const int64_t end = std::clamp<int64_t>(quotient(row.input - first, step), begin, row.length());
      std::memset(to, 0, begin * position_bytes);
      kernels_.pack(from + (first + begin * step) * channels * element_, input_end_, step * channels, end - begin,
                    width_, to + begin * position_bytes);
      std::memset(to + end * position_bytes, 0, (row.length() - end) * position_bytes);
      to += row.length() * position_bytes;
    }
  };
  for (int64_t group = task.first_group; group < task.first_group + task.groups; ++group) {
    for (int64_t channel = 0; channel < task.inputs; channel += width_) {
      const char* from = input_ + (group * sizes_.inputs + task.first_input + channel) * element_;
      for (int64_t n = 0; n < axes_[0].positions(); ++n) {
        for (int64_t d = 0; d < axes_[1].positions(); ++d) {
          for (int64_t h = 0; h < axes_[2].positions(); ++h) {
            const int64_t positions[] = {n, d, h};
            bool is_inside = true;
            int64_t line = 0;
            for (int axis = 0; axis < 3; ++axis) {
              const int64_t index = axes_[axis].input_of(block.index[axis], positions[axis]);
              is_inside &= index >= 0 && index < axes_[axis].input;
              line = line * axes_[axis].input + index;
            }
            if (is_inside) {
              pack_row(from + line * row.input * channels * element_);
            } else {
              std::memset(to, 0, row.positions() * position_bytes);
              to += row.positions() * position_bytes;
            }
          }
        }
      }
    }
  }
}

void WeightGradient::pack_grad(const Task& task, const Block& block, char* to) const {
  const int64_t channels = sizes_.groups * sizes_.outputs, most = kernels_.outputs_at_once;
  const Split &samples = axes_[0].outputs, &depth = axes_[1].outputs, &height = axes_[2].outputs,
              &width = axes_[3].outputs;
  const int64_t columns = width.size_of(block.index[3]);
  for (int64_t group = task.first_group; group < task.first_group + task.groups; ++group) {
    for (int64_t output = 0; output < task.outputs; output += most) {
      const int64_t at_once = task.outputs - output > most / 2 ? most : most / 2;
      const char* from = grad_ + (group * sizes_.outputs + task.first_output + output) * element_;
      char* row = to + ((group - task.first_group) * outputs_padded_ + output) * capacity_ * number_;
      for (int64_t n = 0; n < samples.size_of(block.index[0]); ++n) {
        for (int64_t d = 0; d < depth.size_of(block.index[1]); ++d) {
          for (int64_t h = 0; h < height.size_of(block.index[2]); ++h, row += columns * at_once * number_) {
            const int64_t line =
                ((samples.begin(block.index[0]) + n) * depth.count + depth.begin(block.index[1]) + d) * height.count +
                height.begin(block.index[2]) + h;
            const int64_t position = line * width.count + width.begin(block.index[3]);
            kernels_.pack(from + position * channels * element_, grad_end_, channels, columns, at_once, row);
          }
        }
      }
    }
  }
}

void WeightGradient::add(const Task& task, int64_t range, char* scratch, char* sums) const {
  const int64_t planes = quotient(task.inputs, width_), registers = planes * taps_ / run_taps_ * run_registers_;
  const int64_t group_input = planes * plane_ * number_, group_grad = outputs_padded_ * capacity_ * number_;
  char *input = scratch, *grad = scratch + groups_.size * group_input;
  char* bias = sums + task.groups * outputs_padded_ * row_ * number_;
  std::vector<int64_t> rows;
  std::memset(sums, 0, sums_of(task) * number_);
  for (int64_t index = blocks_.begin(range); index < blocks_.begin(range) + blocks_.size_of(range); ++index) {
    const Block box = block(index);
    pack_input(task, box, input);
    pack_grad(task, box, grad);
    rows.clear();
    const auto count = [&](int axis) { return axes_[axis].outputs.size_of(box.index[axis]); };
    const auto step = [&](int axis) { return axes_[axis].step(); };
    for (int64_t n = 0; n < count(0); ++n) {
      for (int64_t d = 0; d < count(1); ++d) {
        for (int64_t h = 0; h < count(2); ++h) {
          const int64_t line = (n * step(0) * axes_[1].positions() + d * step(1)) * axes_[2].positions() + h * step(2);
          rows.push_back(line * axes_[3].positions() * width_);
        }
      }
    }
    for (int64_t group = 0; group < task.groups; ++group) {
      const PackedBlock packed{.input = input + group * group_input,
                               .grad = grad + group * group_grad,
                               .rows = rows.data(),
                               .row_count = static_cast<int64_t>(rows.size()),
                               .columns = count(3),
                               .step = step(3) * width_,
                               .offsets = offsets_.data(),
                               .registers = registers,
                               .outputs = task.outputs,
                               .capacity = capacity_};
      kernels_.multiply(packed, sums + group * outputs_padded_ * row_ * number_);
      if (grad_bias_ && task.first_input == 0) kernels_.sum(packed, bias + group * outputs_padded_ * number_);
    }
  }
}

void WeightGradient::write(const Task& task, char* sums) const {
  const int64_t part = sums_of(task), run = run_registers_ * kernels_.lanes, runs = taps_ / run_taps_;
  const int64_t planes = quotient(task.inputs, width_);
  const char* bias = sums + task.groups * outputs_padded_ * row_ * number_;
  for (int64_t group = 0; group < task.groups; ++group) {
    const int64_t first = (task.first_group + group) * sizes_.outputs + task.first_output;
    for (int64_t output = 0; output < task.outputs; ++output) {
      // The sums of an output are `[planes][runs][registers]`.
      const int64_t from = group * outputs_padded_ * row_ + output * planes * runs * run;
      const int64_t to = (first + output) * taps_ * sizes_.inputs + task.first_input;
      for (int64_t plane = 0; plane < planes; ++plane) {
        const int64_t channels = std::min(width_, task.inputs - plane * width_);
        kernels_.write(sums + (from + plane * runs * run) * number_, run, blocks_.parts, part, runs,
                       run_taps_ * channels, grad_weight_ + (to + plane * width_) * element_,
                       run_taps_ * sizes_.inputs);
      }
    }
    if (grad_bias_ && task.first_input == 0) {
      kernels_.write(const_cast<char*>(bias) + group * outputs_padded_ * number_, 0, blocks_.parts, part, 1,
                     task.outputs, grad_bias_ + first * element_, 0);
    }
  }
}

void WeightGradient::compute() const {
  const int64_t tasks = groups_.parts * inputs_.parts * outputs_.parts, ranges = blocks_.parts;
  const int64_t planes = quotient(std::min(inputs_.size, sizes_.inputs), width_);
  // Registers are loaded and stored beyond the last plane.
  const int64_t packed = groups_.size * (outputs_padded_ * capacity_ + planes * plane_) + 2 * kernels_.lanes;
  const int64_t most = groups_.size * outputs_padded_ * (row_ + 1);
  const int64_t products = most / groups_.size * groups_.size * capacity_ * blocks_.size;
  const int64_t grain = std::max<int64_t>(1, products_worth_a_thread / std::max<int64_t>(1, products));
  c10::Allocator& allocator = *c10::GetCPUAllocator();
  const auto allocate = [&](int64_t numbers) { return allocator.allocate(numbers * number_); };
  const auto pointer = [](const c10::DataPtr& memory) { return static_cast<char*>(memory.get()); };

  const c10::DataPtr all_sums = ranges > 1 ? allocate(tasks * ranges * most) : c10::DataPtr();
  at::parallel_for(0, tasks * ranges, grain, [&](int64_t begin, int64_t end) {
    const c10::DataPtr scratch = allocate(packed), sums = ranges > 1 ? c10::DataPtr() : allocate(most);
    for (int64_t i = begin; i < end; ++i) {
      const Task part = task(i / ranges);
      if (ranges > 1) {
        char* of_task = pointer(all_sums) + i / ranges * ranges * most * number_;
        add(part, i % ranges, pointer(scratch), of_task + i % ranges * sums_of(part) * number_);
      } else {
        add(part, 0, pointer(scratch), pointer(sums));
        write(part, pointer(sums));
      }
    }
  });
  if (ranges == 1) return;
  at::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) write(task(i), pointer(all_sums) + i * ranges * most * number_);
  });
}

}  // namespace

void weight_gradient(const ConvolutionSizes& sizes, const at::Tensor& grad, const at::Tensor& input,
                     const at::Tensor& grad_weight, const at::Tensor& grad_bias) {
  if (grad.numel() == 0 || input.numel() == 0) {
    grad_weight.zero_();
    if (grad_bias.defined()) grad_bias.zero_();
    return;
  }
  WeightGradient(sizes, grad, input, grad_weight, grad_bias).compute();
}

}  // namespace nhwc::cpu
