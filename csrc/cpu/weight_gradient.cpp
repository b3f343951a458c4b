// A block is a box of output positions and the input under their taps. Both are packed: the input into planes of a few
// channels, the gradient into groups of a few. In a plane, each tap of the kernel is the same stream of numbers from
// another offset on, so that the block's part of the gradient is outer products of streams, without a copy for each
// tap.
//
// A task is a part of the weight, small enough that its sums and a block of its channels fit into a cache, and a range
// of the blocks. Tasks depend on the sizes alone, and not on the number of threads, so the results do not either.
#include "cpu/weight_gradient.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/work/ranges.h"
#include "cpu/work/rows.h"

namespace nhwc::cpu {
namespace {

// For caches of 32 KiB and 512 KiB. Not the sizes of this CPU, on which the results would then depend.
constexpr int64_t positions_of_block = 256, most_channels = 128, most_sums = 1 << 16;
constexpr int64_t channels_of_groups = 64;  // of several small groups in one task
constexpr int64_t blocks_worth_a_range = 4;
constexpr int64_t outputs_worth_stacking = 16;

/// Samples, depth, height and width.
constexpr int axes = 4;

/// The outputs of a block.
struct Box {
  int64_t first[axes], count[axes];
};

/// Calls `work` for each row of a box: the indices of all axes but the width.
template <typename Work>
void for_each_row(const int64_t* counts, const Work& work) {
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
  void cut_blocks();
  void choose_planes();
  void place_registers();
  Task task(int64_t index) const;
  Box box(int64_t index) const;
  int64_t tasks() const { return groups_.parts * inputs_.parts * outputs_.parts; }
  int64_t planes(int64_t inputs) const { return divide_up(inputs * lines_, width_); }
  int64_t runs() const { return taps_ / lines_ / run_taps_; }  // of a plane
  int64_t sums_of(const Task& task) const { return task.groups * outputs_padded_ * (row_ + 1); }
  /// Returns the packed positions of an axis. Stacked taps are at one position.
  int64_t positions(int axis) const {
    const bool is_stacked = lines_ > 1 && (axis == 1 || axis == 2);
    return is_stacked ? packed_[axis].length : packed_[axis].positions();
  }
  void add(const Task& task, int64_t range, char* scratch, char* sums) const;
  void pack_input(const Task& task, const Box& box, char* to) const;
  void pack_input_row(const char* from, int64_t first_output, char* to) const;
  void pack_grad(const Task& task, const Box& box, char* to) const;
  void write(const Task& task, char* sums) const;

  const ConvolutionSizes& sizes_;
  const WeightGradientKernels& kernels_;
  const int64_t element_, number_;  // bytes
  const char *const grad_, *const grad_end_, *const input_, *const input_end_;
  char *const grad_weight_, *const grad_bias_;
  const int64_t taps_;

  Parts groups_, inputs_, outputs_;           // of tasks
  std::vector<Parts> blocks_;                 // of the outputs of each axis
  std::vector<PackedAxis> packed_;            // the input of a block
  Parts ranges_{1, 1};                        // of blocks
  int64_t lines_ = 1;                         // of the kernel, which are stacked
  int64_t width_;                             // numbers of a position of a plane: channels, of all these lines
  int64_t run_taps_ = 1, run_registers_ = 1;  // taps that are neighbours in memory, and the registers that they fill
  int64_t plane_ = 0, capacity_ = 1;          // numbers of a plane, outputs of a block
  std::vector<int64_t> offsets_;              // of all registers of a group
  int64_t outputs_padded_, row_ = 0;          // outputs of a task's group, numbers of the sums of one of them
};

WeightGradient::WeightGradient(const ConvolutionSizes& sizes, const at::Tensor& grad, const at::Tensor& input,
                               const at::Tensor& grad_weight, const at::Tensor& grad_bias)
    : sizes_(sizes),
      kernels_(of_type(level_kernels().weight_gradient, input.scalar_type())),
      element_(input.element_size()),
      number_(std::max<int64_t>(element_, sizeof(float))),
      grad_(static_cast<const char*>(grad.const_data_ptr())),
      grad_end_(grad_ + grad.nbytes()),
      input_(static_cast<const char*>(input.const_data_ptr())),
      input_end_(input_ + input.nbytes()),
      grad_weight_(static_cast<char*>(grad_weight.mutable_data_ptr())),
      grad_bias_(grad_bias.defined() ? static_cast<char*>(grad_bias.mutable_data_ptr()) : nullptr),
      taps_(sizes.taps()),
      groups_(sizes.groups, std::max<int64_t>(1, channels_of_groups / std::max(sizes.inputs, sizes.outputs))),
      inputs_(sizes.inputs, channels_of_task(taps_, 2 * kernels_.lanes), kernels_.lanes),
      outputs_(sizes.outputs, channels_of_task(taps_, kernels_.outputs_at_once), kernels_.outputs_at_once),
      width_(kernels_.lanes),
      outputs_padded_(round_up(outputs_.size_of(0), kernels_.outputs_at_once)) {
  cut_blocks();
  choose_planes();
  place_registers();
}

/// Blocks have the longest rows that they can have.
void WeightGradient::cut_blocks() {
  int64_t blocks = 1;
  for (int axis = axes - 1; axis >= 0; --axis) {
    const TapAxis taps = axis == 0 ? plain_axis(sizes_.samples) : forward_axis(sizes_, axis - 1);
    const Parts outputs(taps.count, std::max<int64_t>(1, positions_of_block / capacity_));
    blocks_.insert(blocks_.begin(), outputs);
    packed_.insert(packed_.begin(), packed_axis(taps, outputs.size));
    capacity_ *= outputs.size;
    blocks *= outputs.parts;
  }
  const int64_t enough_ranges = divide_up(enough_tasks, tasks());
  ranges_ = Parts(blocks, std::max(blocks_worth_a_range, divide_up(blocks, enough_ranges)));
}

/// A plane has the channels of one register or all channels. In the latter, the taps of a line of the kernel are
/// neighbours and may fill fewer registers, and still fewer if lines are stacked, which takes longer to pack.
void WeightGradient::choose_planes() {
  const int64_t lanes = kernels_.lanes, channels = sizes_.inputs, lines = taps_ / sizes_.kernel[2];
  const bool are_neighbours = sizes_.dilation[2] == 1 && packed_[3].tap_step == 1;
  const int64_t neighbours = are_neighbours ? sizes_.kernel[2] : 1, run = divide_up(neighbours * channels, lanes),
                stacked_run = divide_up(neighbours * lines * channels, lanes);
  if (inputs_.parts == 1 && channels < 4 * lanes && run < neighbours * divide_up(channels, lanes)) {
    width_ = channels;
    run_taps_ = neighbours;
    run_registers_ = run;
  }
  if (inputs_.parts == 1 && channels < lanes && sizes_.outputs >= outputs_worth_stacking &&
      10 * stacked_run <= 9 * lines * run) {
    lines_ = lines;
    width_ = lines * channels;
    run_taps_ = neighbours;
    run_registers_ = stacked_run;
    for (int axis : {1, 2}) packed_[axis] = packed_by_tap(forward_axis(sizes_, axis - 1), blocks_[axis].size);
  }
}

/// Finds where in a block's planes each register of a group begins.
void WeightGradient::place_registers() {
  int64_t step[axes] = {0, 0, 0, width_};  // numbers from position to position
  for (int axis = 2; axis >= 0; --axis) step[axis] = step[axis + 1] * positions(axis + 1);
  plane_ = step[0] * positions(0);
  const int64_t row_taps = sizes_.kernel[2];
  for (int64_t plane = 0; plane < planes(inputs_.size_of(0)); ++plane) {
    for (int64_t tap = 0; tap < taps_ / lines_; tap += run_taps_) {
      const int64_t line = tap / row_taps;
      const int64_t taps[axes] = {0, line / sizes_.kernel[1], line % sizes_.kernel[1], tap % row_taps};
      int64_t offset = plane * plane_;
      for (int axis = 1; axis < axes; ++axis) offset += taps[axis] * packed_[axis].tap_step * step[axis];
      for (int64_t r = 0; r < run_registers_; ++r) offsets_.push_back(offset + r * kernels_.lanes);
    }
  }
  row_ = static_cast<int64_t>(offsets_.size()) * kernels_.lanes;
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
    const Parts& outputs = blocks_[axis];
    box.first[axis] = outputs.begin(index % outputs.parts);
    box.count[axis] = outputs.size_of(index % outputs.parts);
    index /= outputs.parts;
  }
  return box;
}

/// Packs a row of the input, with zeros for the padding. Those of stacked lines are there already.
void WeightGradient::pack_input_row(const char* from, int64_t first_output, char* to) const {
  const int64_t channels = sizes_.groups * sizes_.inputs, position = width_ * number_;
  const PackedAxis& axis = packed_[3];
  for (int64_t index = 0; index < axis.segments; ++index, to += axis.length * position) {
    const Segment segment = segment_of(axis, first_output, index);
    const auto [begin, end] = segment.inside;
    if (lines_ == 1) std::memset(to, 0, begin * position);
    kernels_.pack(from + segment.source * channels * element_, input_end_, axis.source_step * channels, end - begin,
                  width_ / lines_, to + begin * position, width_);
    if (lines_ == 1) std::memset(to + end * position, 0, (axis.length - end) * position);
  }
}

/// Packs a block's input as `[groups, planes, N, D, H, W, width_]`.
void WeightGradient::pack_input(const Task& task, const Box& box, char* to) const {
  const int64_t channels = sizes_.groups * sizes_.inputs, width = width_ / lines_,
                row_bytes = positions(3) * width_ * number_;
  const int64_t counts[] = {positions(0), positions(1), positions(2)};
  for (int64_t group = task.first_group; group < task.first_group + task.groups; ++group) {
    for (int64_t channel = 0; channel < task.inputs; channel += width) {
      const char* from = input_ + (group * sizes_.inputs + task.first_input + channel) * element_;
      for_each_row(counts, [&](const int64_t* index) {
        if (lines_ > 1) std::memset(to, 0, row_bytes);
        for (int64_t line = 0; line < lines_; ++line) {
          const int64_t row_positions[] = {index[0], index[1] + line / sizes_.kernel[1] * packed_[1].length,
                                           index[2] + line % sizes_.kernel[1] * packed_[2].length};
          const int64_t row = source_row(packed_.data(), 3, box.first, row_positions);
          if (row >= 0) {
            pack_input_row(from + row * packed_[3].source * channels * element_, box.first[3],
                           to + line * width * number_);
          } else if (lines_ == 1) {
            std::memset(to, 0, row_bytes);
          }
        }
        to += row_bytes;
      });
    }
  }
}

/// Packs a block's gradient as `[groups, outputs / at_once, N, D, H, W, at_once]`.
void WeightGradient::pack_grad(const Task& task, const Box& box, char* to) const {
  const int64_t channels = sizes_.groups * sizes_.outputs, most = kernels_.outputs_at_once;
  for (int64_t group = 0; group < task.groups; ++group) {
    for (int64_t output = 0; output < task.outputs; output += most) {
      const int64_t at_once = task.outputs - output > most / 2 ? most : most / 2;
      const int64_t channel = (task.first_group + group) * sizes_.outputs + task.first_output + output;
      char* row = to + (group * outputs_padded_ + output) * capacity_ * number_;
      for_each_row(box.count, [&](const int64_t* index) {
        int64_t position = 0;
        for (int axis = 0; axis < axes; ++axis) {
          position = position * blocks_[axis].count + box.first[axis] + (axis < 3 ? index[axis] : 0);
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
  for (int64_t block = ranges_[range].begin; block < ranges_[range].end; ++block) {
    const Box outputs = box(block);
    pack_input(task, outputs, input);
    pack_grad(task, outputs, grad);
    rows.clear();
    for_each_row(outputs.count, [&](const int64_t* index) {
      int64_t row = 0;
      for (int axis = 0; axis < 3; ++axis) row = row * positions(axis) + index[axis] * packed_[axis].step;
      rows.push_back(row * positions(3) * width_);
    });
    for (int64_t group = 0; group < task.groups; ++group) {
      const PackedBlock packed{.input = input + group * group_input,
                               .grad = grad + group * group_grad,
                               .rows = rows.data(),
                               .row_count = static_cast<int64_t>(rows.size()),
                               .columns = outputs.count[3],
                               .step = packed_[3].step * width_,
                               .offsets = offsets_.data(),
                               .registers = planes(task.inputs) * runs() * run_registers_,
                               .outputs = task.outputs,
                               .capacity = capacity_};
      kernels_.multiply(packed, sums + group * outputs_padded_ * row_ * number_);
      if (grad_bias_ && task.first_input == 0) kernels_.sum(packed, bias + group * outputs_padded_ * number_);
    }
  }
}

/// Writes the sums of a task, added up over the ranges.
void WeightGradient::write(const Task& task, char* sums) const {
  const int64_t run = run_registers_ * kernels_.lanes, width = width_ / lines_;
  add_up_parts_of(number_ == sizeof(double) ? at::kDouble : at::kFloat, sums, ranges_.parts, sums_of(task));
  const char* bias = sums + task.groups * outputs_padded_ * row_ * number_;
  for (int64_t group = 0; group < task.groups; ++group) {
    const int64_t first_output = (task.first_group + group) * sizes_.outputs + task.first_output;
    const char* from = sums + group * outputs_padded_ * row_ * number_;
    for (int64_t output = first_output; output < first_output + task.outputs; ++output) {
      for (int64_t channel = 0; channel < task.inputs; channel += width, from += runs() * run * number_) {
        const int64_t channels = std::min(width, task.inputs - channel);
        char* to = grad_weight_ + (output * taps_ * sizes_.inputs + task.first_input + channel) * element_;
        if (lines_ == 1) {
          kernels_.write(from, run, runs(), run_taps_ * channels, to, run_taps_ * sizes_.inputs);
          continue;
        }
        for (int64_t tap = 0; tap < sizes_.kernel[2]; ++tap, to += channels * element_) {
          kernels_.write(from + (tap / run_taps_ * run + tap % run_taps_ * width_) * number_, channels, lines_,
                         channels, to, sizes_.kernel[2] * channels);
        }
      }
    }
    if (grad_bias_ && task.first_input == 0) {
      kernels_.write(bias + group * outputs_padded_ * number_, 0, 1, task.outputs, grad_bias_ + first_output * element_,
                     0);
    }
  }
}

void WeightGradient::compute() const {
  constexpr int64_t line = 64;
  const Task largest = task(0);
  const int64_t ranges = ranges_.parts, of_task = sums_of(largest);
  // Registers are loaded and stored beyond the last number.
  const int64_t packed_bytes = round_up(
      (groups_.size * (outputs_padded_ * capacity_ + planes(largest.inputs) * plane_) + 2 * kernels_.lanes) * number_,
      line);
  const int64_t products = of_task * capacity_ * ranges_.size, task_bytes = of_task * number_;
  const c10::DataPtr memory = c10::GetCPUAllocator()->allocate(ranges > 1 ? tasks() * ranges * task_bytes : 0);
  auto* all_sums = static_cast<char*>(memory.get());
  for_each_task(tasks() * ranges, products, packed_bytes + (ranges > 1 ? 0 : task_bytes),
                [&](int64_t i, char* scratch) {
                  const Task part = task(i / ranges);
                  char* sums = ranges > 1 ? all_sums + i / ranges * ranges * task_bytes : scratch + packed_bytes;
                  add(part, i % ranges, scratch, sums + i % ranges * sums_of(part) * number_);
                  if (ranges == 1) write(part, sums);
                });
  if (ranges == 1) return;
  for_each_task(tasks(), products, 0, [&](int64_t i, char*) { write(task(i), all_sums + i * ranges * task_bytes); });
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
