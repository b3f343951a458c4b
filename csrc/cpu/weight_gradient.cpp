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
constexpr int64_t outputs_worth_stacking = 16;

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
/// the first and the last or, where that is fewer, those of each tap. In a stacked axis, the input of all taps is at
/// one position.
struct BlockAxis {
  int64_t input, kernel, stride, padding, dilation;
  Split outputs;
  bool is_stacked = false;

  int64_t all() const { return (outputs.size - 1) * stride + (kernel - 1) * dilation + 1; }
  bool is_by_tap() const { return is_stacked || kernel * outputs.size < all(); }
  int64_t segments() const { return is_by_tap() ? kernel : 1; }
  int64_t length() const { return is_by_tap() ? outputs.size : all(); }  // of a segment
  int64_t positions() const { return is_stacked ? length() : segments() * length(); }
  int64_t step() const { return is_by_tap() ? 1 : stride; }                   // from output to output, in positions
  int64_t tap_step() const { return is_by_tap() ? outputs.size : dilation; }  // from tap to tap, in positions
  int64_t input_step() const { return is_by_tap() ? stride : 1; }             // from position to position, in the input
  int64_t input_of(int64_t first_output, int64_t position) const {
    return first_output * stride - padding + position / length() * dilation + position % length() * input_step();
  }
};

/// Samples, depth, height and width.
constexpr int axes = 4;

/// The outputs of a block.
struct Box {
  int64_t first[axes], count[axes];
};

/// Calls `work` for each line of a box: the indices of all axes but the width.
template <typename Work>
void for_each_line(const int64_t* counts, const Work& work) {
  int64_t index[axes - 1];
  for (index[0] = 0; index[0] < counts[0]; ++index[0]) {
    for (index[1] = 0; index[1] < counts[1]; ++index[1]) {
      for (index[2] = 0; index[2] < counts[2]; ++index[2]) work(index);
    }
  }
}

/// A part of the weight: some groups, and of each some channels.
struct Task {
  int64_t first_group, groups, first_input, inputs, first_output, outputs;
};

/// Returns how many channels of input and of output a task has at most, so that the sums of all taps fit into a cache.
int64_t channels_of_task(int64_t taps, int64_t unit) {
  const auto side = static_cast<int64_t>(std::sqrt(static_cast<double>(most_sums) / static_cast<double>(taps)));
  return std::clamp(side, unit, most_channels) / unit * unit;
}

class WeightGradient {
 public:
  WeightGradient(const ConvolutionSizes& sizes, const at::Tensor& grad, const at::Tensor& input,
                 const at::Tensor& grad_weight, const at::Tensor& grad_bias);
  void compute() const;

 private:
  Task task(int64_t index) const;
  Box box(int64_t index) const;
  int64_t planes(int64_t inputs) const { return quotient(inputs * lines_, width_); }
  int64_t runs() const { return taps_ / lines_ / run_taps_; }  // of a plane
  int64_t sums_of(const Task& task) const { return task.groups * outputs_padded_ * (row_ + 1); }
  void add(const Task& task, int64_t range, char* scratch, char* sums) const;
  void pack_input(const Task& task, const Box& box, char* to) const;
  void pack_row(const char* from, int64_t first_output, char* to) const;
  void pack_grad(const Task& task, const Box& box, char* to) const;
  void write(const Task& task, char* sums) const;

  const ConvolutionSizes& sizes_;
  const WeightGradientKernels& kernels_;
  const int64_t element_, number_;  // bytes
  const char *const grad_, *const grad_end_, *const input_, *const input_end_;
  char *const grad_weight_, *const grad_bias_;
  const int64_t taps_;

  Split groups_, inputs_, outputs_;           // of tasks
  std::vector<BlockAxis> axes_;               // of blocks
  Split ranges_{1, 1};                        // of blocks
  int64_t lines_ = 1;                         // of the kernel, which are stacked
  int64_t width_;                             // numbers of a position of a plane: channels, of all these lines
  int64_t run_taps_ = 1, run_registers_ = 1;  // taps that are neighbours in memory, and the registers that they fill
  int64_t plane_ = 0, capacity_ = 1;          // numbers of a plane, outputs of a block
  std::vector<int64_t> offsets_;              // of all registers of a group
  int64_t outputs_padded_, row_;              // outputs of a task's group, numbers of the sums of one of them
};

WeightGradient::WeightGradient(const ConvolutionSizes& sizes, const at::Tensor& grad, const at::Tensor& input,
                               const at::Tensor& grad_weight, const at::Tensor& grad_bias)
    : sizes_(sizes),
      kernels_(of_type(weight_gradient_kernels(), input.scalar_type())),
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
      outputs_(sizes.outputs, channels_of_task(taps_, kernels_.outputs_at_once), kernels_.outputs_at_once),
      width_(kernels_.lanes) {
  const auto outputs = [&](int64_t count) {
    const Split split(count, std::max<int64_t>(1, positions_of_block / capacity_));
    capacity_ *= split.size;
    return split;
  };
  for (int axis = 2; axis >= 0; --axis) {
    axes_.insert(axes_.begin(), {sizes.input[axis], sizes.kernel[axis], sizes.stride[axis], sizes.padding[axis],
                                 sizes.dilation[axis], outputs(sizes.output[axis])});
  }
  axes_.insert(axes_.begin(), {sizes.samples, 1, 1, 0, 1, outputs(sizes.samples)});
  int64_t blocks = 1;
  for (const BlockAxis& axis : axes_) blocks *= axis.outputs.parts;
  const int64_t tasks = groups_.parts * inputs_.parts * outputs_.parts;
  ranges_ = Split(blocks, std::max(blocks_worth_a_range, quotient(blocks, quotient(enough_tasks, tasks))));

  // A plane has the channels of one register or all channels. In the latter, the taps of a line of the kernel are
  // neighbours and may fill fewer registers, and still fewer if lines are stacked, which takes longer to pack.
  const int64_t lanes = kernels_.lanes, channels = sizes.inputs, row_taps = sizes.kernel[2], lines = taps_ / row_taps;
  const bool are_neighbours = sizes.dilation[2] == 1 && !axes_[3].is_by_tap();
  const int64_t neighbours = are_neighbours ? row_taps : 1, run = quotient(neighbours * channels, lanes),
                stacked_run = quotient(neighbours * lines * channels, lanes);
  if (inputs_.parts == 1 && channels < 4 * lanes && run < neighbours * quotient(channels, lanes)) {
    width_ = channels;
    run_taps_ = neighbours;
    run_registers_ = run;
  }
  if (inputs_.parts == 1 && channels < lanes && sizes.outputs >= outputs_worth_stacking &&
      10 * stacked_run <= 9 * lines * run) {
    lines_ = lines;
    width_ = lines * channels;
    run_taps_ = neighbours;
    run_registers_ = stacked_run;
    axes_[1].is_stacked = axes_[2].is_stacked = true;
  }

  int64_t step[axes] = {0, 0, 0, width_};  // numbers from position to position
  for (int axis = 2; axis >= 0; --axis) step[axis] = step[axis + 1] * axes_[axis + 1].positions();
  plane_ = step[0] * axes_[0].positions();
  for (int64_t plane = 0; plane < planes(inputs_.size_of(0)); ++plane) {
    for (int64_t tap = 0; tap < taps_ / lines_; tap += run_taps_) {
      const int64_t line = tap / row_taps;
      const int64_t taps[axes] = {0, line / sizes.kernel[1], line % sizes.kernel[1], tap % row_taps};
      int64_t offset = plane * plane_;
      for (int axis = 1; axis < axes; ++axis) offset += taps[axis] * axes_[axis].tap_step() * step[axis];
      for (int64_t r = 0; r < run_registers_; ++r) offsets_.push_back(offset + r * lanes);
    }
  }
  row_ = static_cast<int64_t>(offsets_.size()) * lanes;
  outputs_padded_ = multiple(outputs_.size_of(0), kernels_.outputs_at_once);
}

Task WeightGradient::task(int64_t index) const {
  const int64_t output = index % outputs_.parts, input = index / outputs_.parts % inputs_.parts,
                group = index / outputs_.parts / inputs_.parts;
  return {groups_.begin(group),   groups_.size_of(group), inputs_.begin(input),
          inputs_.size_of(input), outputs_.begin(output), outputs_.size_of(output)};
}

Box WeightGradient::box(int64_t index) const {
  Box box;
  for (int axis = axes - 1; axis >= 0; --axis) {
    const Split& outputs = axes_[axis].outputs;
    box.first[axis] = outputs.begin(index % outputs.parts);
    box.count[axis] = outputs.size_of(index % outputs.parts);
    index /= outputs.parts;
  }
  return box;
}

/// Packs one line of the input, with zeros for the padding.
void WeightGradient::pack_row(const char* from, int64_t first_output, char* to) const {
  const int64_t channels = sizes_.groups * sizes_.inputs, position = width_ * number_;
  const BlockAxis& axis = axes_[3];
  const int64_t length = axis.length(), step = axis.input_step();
  for (int64_t segment = 0; segment < axis.segments(); ++segment, to += length * position) {
    const int64_t first = axis.input_of(first_output, segment * length);
    const int64_t begin = std::clamp<int64_t>(first < 0 ? quotient(-first, step) : 0, 0, length);
    const int64_t end = std::clamp<int64_t>(first < axis.input ? quotient(axis.input - first, step) : 0, begin, length);
    if (lines_ == 1) std::memset(to, 0, begin * position);
    kernels_.pack(from + (first + begin * step) * channels * element_, input_end_, step * channels, end - begin,
                  width_ / lines_, to + begin * position, width_);
    if (lines_ == 1) std::memset(to + end * position, 0, (length - end) * position);
  }
}

void WeightGradient::pack_input(const Task& task, const Box& box, char* to) const {
  const int64_t channels = sizes_.groups * sizes_.inputs, width = width_ / lines_,
                row = axes_[3].positions() * width_ * number_;
  const int64_t counts[] = {axes_[0].positions(), axes_[1].positions(), axes_[2].positions()};
  for (int64_t group = task.first_group; group < task.first_group + task.groups; ++group) {
    for (int64_t channel = 0; channel < task.inputs; channel += width) {
      const char* from = input_ + (group * sizes_.inputs + task.first_input + channel) * element_;
      for_each_line(counts, [&](const int64_t* position) {
        if (lines_ > 1) std::memset(to, 0, row);
        for (int64_t line = 0; line < lines_; ++line) {
          const int64_t taps[] = {0, line / sizes_.kernel[1], line % sizes_.kernel[1]};
          bool is_inside = true;
          int64_t input_line = 0;
          for (int axis = 0; axis < 3; ++axis) {
            const int64_t index =
                axes_[axis].input_of(box.first[axis], position[axis] + taps[axis] * axes_[axis].length());
            is_inside &= index >= 0 && index < axes_[axis].input;
            input_line = input_line * axes_[axis].input + index;
          }
          if (is_inside) {
            pack_row(from + input_line * axes_[3].input * channels * element_, box.first[3],
                     to + line * width * number_);
          } else if (lines_ == 1) {
            std::memset(to, 0, row);
          }
        }
        to += row;
      });
    }
  }
}

void WeightGradient::pack_grad(const Task& task, const Box& box, char* to) const {
  const int64_t channels = sizes_.groups * sizes_.outputs, most = kernels_.outputs_at_once;
  for (int64_t group = 0; group < task.groups; ++group) {
    for (int64_t output = 0; output < task.outputs; output += most) {
      const int64_t at_once = task.outputs - output > most / 2 ? most : most / 2;
      const int64_t channel = (task.first_group + group) * sizes_.outputs + task.first_output + output;
      char* row = to + (group * outputs_padded_ + output) * capacity_ * number_;
      for_each_line(box.count, [&](const int64_t* index) {
        int64_t position = 0;
        for (int axis = 0; axis < axes; ++axis) {
          position = position * axes_[axis].outputs.count + box.first[axis] + (axis < 3 ? index[axis] : 0);
        }
        kernels_.pack(grad_ + (position * channels + channel) * element_, grad_end_, channels, box.count[3], at_once,
                      row, at_once);
        row += box.count[3] * at_once * number_;
      });
    }
  }
}

/// Computes the sums of a task over a range of blocks.
void WeightGradient::add(const Task& task, int64_t range, char* scratch, char* sums) const {
  const int64_t group_input = planes(task.inputs) * plane_ * number_,
                group_grad = outputs_padded_ * capacity_ * number_;
  char *input = scratch, *grad = scratch + task.groups * group_input;  // packed in this order, see `pack`
  char* bias = sums + task.groups * outputs_padded_ * row_ * number_;
  std::vector<int64_t> rows;
  std::memset(sums, 0, sums_of(task) * number_);
  for (int64_t block = ranges_.begin(range); block < ranges_.begin(range) + ranges_.size_of(range); ++block) {
    const Box outputs = box(block);
    pack_input(task, outputs, input);
    pack_grad(task, outputs, grad);
    rows.clear();
    for_each_line(outputs.count, [&](const int64_t* index) {
      int64_t line = 0;
      for (int axis = 0; axis < 3; ++axis) {
        line = line * axes_[axis].positions() + index[axis] * axes_[axis].step();
      }
      rows.push_back(line * axes_[3].positions() * width_);
    });
    for (int64_t group = 0; group < task.groups; ++group) {
      const PackedBlock packed{.input = input + group * group_input,
                               .grad = grad + group * group_grad,
                               .rows = rows.data(),
                               .row_count = static_cast<int64_t>(rows.size()),
                               .columns = outputs.count[3],
                               .step = axes_[3].step() * width_,
                               .offsets = offsets_.data(),
                               .registers = planes(task.inputs) * runs() * run_registers_,
                               .outputs = task.outputs,
                               .capacity = capacity_};
      kernels_.multiply(packed, sums + group * outputs_padded_ * row_ * number_);
      if (grad_bias_ && task.first_input == 0) kernels_.sum(packed, bias + group * outputs_padded_ * number_);
    }
  }
}

/// Writes the sums of a task, merged over the ranges.
void WeightGradient::write(const Task& task, char* sums) const {
  const int64_t range = sums_of(task), run = run_registers_ * kernels_.lanes, width = width_ / lines_;
  char* bias = sums + task.groups * outputs_padded_ * row_ * number_;
  for (int64_t group = 0; group < task.groups; ++group) {
    const int64_t first_output = (task.first_group + group) * sizes_.outputs + task.first_output;
    char* from = sums + group * outputs_padded_ * row_ * number_;
    for (int64_t output = first_output; output < first_output + task.outputs; ++output) {
      for (int64_t channel = 0; channel < task.inputs; channel += width, from += runs() * run * number_) {
        const int64_t channels = std::min(width, task.inputs - channel);
        char* to = grad_weight_ + (output * taps_ * sizes_.inputs + task.first_input + channel) * element_;
        if (lines_ == 1) {
          kernels_.write(from, run, ranges_.parts, range, runs(), run_taps_ * channels, to, run_taps_ * sizes_.inputs);
          continue;
        }
        for (int64_t tap = 0; tap < sizes_.kernel[2]; ++tap, to += channels * element_) {
          kernels_.write(from + (tap / run_taps_ * run + tap % run_taps_ * width_) * number_, channels, ranges_.parts,
                         range, lines_, channels, to, sizes_.kernel[2] * channels);
        }
      }
    }
    if (grad_bias_ && task.first_input == 0) {
      kernels_.write(bias + group * outputs_padded_ * number_, 0, ranges_.parts, range, 1, task.outputs,
                     grad_bias_ + first_output * element_, 0);
    }
  }
}

void WeightGradient::compute() const {
  const int64_t tasks = groups_.parts * inputs_.parts * outputs_.parts, ranges = ranges_.parts;
  const Task largest = task(0);
  const int64_t most_sums = sums_of(largest);
  // Registers are loaded and stored beyond the last number.
  const int64_t packed =
      groups_.size * (outputs_padded_ * capacity_ + planes(largest.inputs) * plane_) + 2 * kernels_.lanes;
  constexpr int64_t products_worth_a_thread = 1 << 19;
  const int64_t grain = quotient(products_worth_a_thread, most_sums * capacity_ * ranges_.size);
  const auto allocate = [&](int64_t numbers) { return c10::GetCPUAllocator()->allocate(numbers * number_); };
  const auto pointer = [](const c10::DataPtr& memory) { return static_cast<char*>(memory.get()); };

  const c10::DataPtr all_sums = allocate(ranges > 1 ? tasks * ranges * most_sums : 0);
  at::parallel_for(0, tasks * ranges, grain, [&](int64_t begin, int64_t end) {
    const c10::DataPtr scratch = allocate(packed), own_sums = allocate(ranges > 1 ? 0 : most_sums);
    for (int64_t i = begin; i < end; ++i) {
      const Task part = task(i / ranges);
      char* sums = ranges > 1 ? pointer(all_sums) + i / ranges * ranges * most_sums * number_ : pointer(own_sums);
      add(part, i % ranges, pointer(scratch), sums + i % ranges * sums_of(part) * number_);
      if (ranges == 1) write(part, sums);
    }
  });
  if (ranges == 1) return;
  at::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) write(task(i), pointer(all_sums) + i * ranges * most_sums * number_);
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
