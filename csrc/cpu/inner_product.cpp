// A result is the inner product of a window of the input and a row of the weight, which in channels-last are the same
// numbers in the same order: the taps, and of each its channels.
//
// Registers are along these numbers, so that the weight is read as it is: a few rows at a time, from the first to the
// last, for all positions of a block. Windows are pointers to the pixels under the taps, or small copies.
//
// A task is a block of positions and some of the outputs. Tasks depend on the sizes alone, so the results do not depend
// on the number of threads.
#include "cpu/inner_product.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>

#include "cpu/dispatch.h"
#include "cpu/work/ranges.h"

namespace nhwc::cpu {
namespace {

/// For caches of 32 KiB and 1 MiB, not those of this CPU, on which the results would depend.
constexpr int64_t most_terms = 1024;             // of a part of a sum
constexpr int64_t numbers_of_windows = 1 << 17;  // of a block
constexpr int64_t least_windows = 12, most_windows = 64;
constexpr int64_t numbers_of_line = 16;

const char* first_byte_of(const at::Tensor& tensor) { return static_cast<const char*>(tensor.const_data_ptr()); }

/// The windows of the input: for each position, in the order of the output's memory, the numbers under the taps.
class Windows {
 public:
  Windows(const ConvolutionSizes& sizes, const at::Tensor& input)
      : sizes_(sizes), input_(first_byte_of(input)), pixel_(sizes.inputs * input.element_size()) {}

  int64_t positions() const { return sizes_.samples * sizes_.output[0] * sizes_.output[1] * sizes_.output[2]; }

  /// Finds the pixels under the taps of some positions, `[taps][positions]`; `zeros` is a pixel of them.
  void find(Range positions, const char* zeros, const void** pixels) const {
    for (int64_t p = positions.begin; p < positions.end; ++p) {
      int64_t first[3];
      const int64_t sample = place(p, first);
      const void** to = pixels + p - positions.begin;
      for (int64_t d = 0; d < sizes_.kernel[0]; ++d) {
        for (int64_t h = 0; h < sizes_.kernel[1]; ++h) {
          const int64_t row = row_of(sample, first, d, h);
          for (int64_t w = 0; w < sizes_.kernel[2]; ++w, to += positions.size()) {
            const int64_t column = first[2] + w * sizes_.dilation[2];
            const bool is_inside = row >= 0 && column >= 0 && column < sizes_.input[2];
            *to = is_inside ? pixel(row * sizes_.input[2] + column) : zeros;
          }
        }
      }
    }
  }

  /// Copies the window of each of some positions to a row, so many bytes apart.
  void copy(Range positions, char* rows, int64_t row_bytes) const {
    const int64_t taps = sizes_.kernel[2], dilation = sizes_.dilation[2];
    for (int64_t p = positions.begin; p < positions.end; ++p) {
      int64_t first[3];
      const int64_t sample = place(p, first);
      char* to = rows + (p - positions.begin) * row_bytes;
      const Range columns = indexes_within(first[2], dilation, taps, 0, sizes_.input[2]);
      for (int64_t d = 0; d < sizes_.kernel[0]; ++d) {
        for (int64_t h = 0; h < sizes_.kernel[1]; ++h, to += taps * pixel_) {
          const int64_t row = row_of(sample, first, d, h);
          const Range inside = row < 0 ? Range{0, 0} : columns;
          std::memset(to, 0, inside.begin * pixel_);
          std::memset(to + inside.end * pixel_, 0, (taps - inside.end) * pixel_);
          const char* from = pixel(row * sizes_.input[2] + first[2]);
          if (dilation == 1) {
            std::memcpy(to + inside.begin * pixel_, from + inside.begin * pixel_, inside.size() * pixel_);
            continue;
          }
          for (int64_t w = inside.begin; w < inside.end; ++w) {
            std::memcpy(to + w * pixel_, from + w * dilation * pixel_, pixel_);
          }
        }
      }
    }
  }

 private:
  /// Returns the sample of a position, and the input under the first tap.
  int64_t place(int64_t position, int64_t* first) const {
    for (int axis = 2; axis >= 0; --axis) {
      first[axis] = position % sizes_.output[axis] * sizes_.stride[axis] - sizes_.padding[axis];
      position /= sizes_.output[axis];
    }
    return position;
  }

  /// Returns the index of a row of the input, of all samples, or -1 if it is in the padding.
  int64_t row_of(int64_t sample, const int64_t* first, int64_t d, int64_t h) const {
    const int64_t plane = first[0] + d * sizes_.dilation[0], row = first[1] + h * sizes_.dilation[1];
    const bool is_inside = plane >= 0 && plane < sizes_.input[0] && row >= 0 && row < sizes_.input[1];
    return is_inside ? (sample * sizes_.input[0] + plane) * sizes_.input[1] + row : -1;
  }

  const char* pixel(int64_t index) const { return input_ + index * pixel_; }

  const ConvolutionSizes& sizes_;
  const char* input_;
  int64_t pixel_;  // bytes
};

/// How a convolution is cut.
struct InnerProductPlan {
  int64_t row;         // numbers of a window, and of a row of the weight
  bool are_copied;     // windows, and then of one run each
  int64_t runs, run;   // of a window, and their length
  int64_t copied_row;  // numbers from copy to copy
  Parts blocks, outputs;
  Parts parts_of_run, runs_at_once;  // a part of a sum is some runs, or a part of one

  InnerProductPlan(const ConvolutionSizes& sizes, int64_t positions, int64_t element, int64_t lanes)
      : row(sizes.taps() * sizes.inputs),
        are_copied(are_better_copied(sizes, positions, element, lanes)),
        runs(are_copied ? 1 : sizes.taps()),
        run(row / runs),
        copied_row(round_up(row, numbers_of_line) + numbers_of_line),
        blocks(positions, std::clamp(numbers_of_windows / row, least_windows, most_windows)),
        outputs(sizes.outputs, outputs_of_task(sizes.outputs), numbers_of_line),
        parts_of_run(run, most_terms, numbers_of_line),
        runs_at_once(runs, std::max<int64_t>(1, most_terms / run)) {}

  int64_t parts() const { return runs_at_once.parts * parts_of_run.parts; }

 private:
  /// Short runs do not fill registers, and pixels that are multiples of a page apart push each other out of a cache.
  static bool are_better_copied(const ConvolutionSizes& sizes, int64_t positions, int64_t element, int64_t lanes) {
    constexpr int64_t page = 4096, few = 6;
    if (sizes.taps() > 1) return sizes.inputs % lanes != 0 && sizes.inputs < 8 * lanes;
    return sizes.inputs * element % page == 0 && positions > few;
  }

  int64_t outputs_of_task(int64_t all) const {
    constexpr int64_t worth_copies = 128;
    const int64_t enough = divide_up(all, divide_up(enough_tasks, blocks.parts));
    return are_copied ? std::max(enough, worth_copies) : enough;
  }
};

}  // namespace

void inner_product_forward(const ConvolutionSizes& sizes, const at::Tensor& input, const at::Tensor& weight,
                           const at::Tensor& bias, const at::Tensor& out) {
  if (out.numel() == 0) return;
  const InnerProductKernels& kernels = of_type(level_kernels().inner_product, weight.scalar_type());
  const int64_t element = weight.element_size();
  const Windows windows(sizes, input);
  const InnerProductPlan plan(sizes, windows.positions(), element, kernels.lanes);
  const at::Tensor biases = bias.defined() ? bias.to(at::kFloat).contiguous() : bias;
  const float* numbers = biases.defined() ? biases.const_data_ptr<float>() : nullptr;
  const int64_t copied_row = plan.copied_row * element;
  const int64_t sums_bytes = plan.blocks.size * kernels.rows_at_once * kernels.lanes * sizeof(float);
  const int64_t table_bytes = round_up(plan.runs * plan.blocks.size * sizeof(void*), 64);
  const int64_t pixel_bytes = plan.are_copied ? plan.blocks.size * copied_row : sizes.inputs * element;

  const auto compute = [&](int64_t task, char* scratch) {
    const Range block = plan.blocks[task / plan.outputs.parts], outputs = plan.outputs[task % plan.outputs.parts];
    auto** table = reinterpret_cast<const void**>(scratch + sums_bytes);
    char* pixels = scratch + sums_bytes + table_bytes;  // copies, or zeros
    if (plan.are_copied) {
      windows.copy(block, pixels, copied_row);
      for (int64_t p = 0; p < block.size(); ++p) table[p] = pixels + p * copied_row;
    } else {
      std::memset(pixels, 0, pixel_bytes);
      windows.find(block, pixels, table);
    }
    for (int64_t output = outputs.begin; output < outputs.end; output += kernels.rows_at_once) {
      for (int64_t part = 0; part < plan.parts(); ++part) {
        const Range runs = plan.runs_at_once[part / plan.parts_of_run.parts],
                    in_run = plan.parts_of_run[part % plan.parts_of_run.parts];
        const int64_t first = output * plan.row + runs.begin * plan.run + in_run.begin;
        kernels.multiply(
            {.weight = first_byte_of(weight) + first * element,
             .rows = std::min(kernels.rows_at_once, outputs.end - output),
             .row_step = plan.row,
             .has_next = block.begin == 0 && output + 2 * kernels.rows_at_once <= sizes.outputs,
             .windows = table + runs.begin * block.size(),
             .positions = block.size(),
             .runs = runs.size(),
             .length = in_run.size(),
             .offset = in_run.begin,
             .sums = reinterpret_cast<float*>(scratch),
             .is_first = part == 0,
             .is_last = part + 1 == plan.parts(),
             .bias = numbers ? numbers + output : nullptr,
             .out = static_cast<char*>(out.mutable_data_ptr()) + (block.begin * sizes.outputs + output) * element,
             .out_step = sizes.outputs});
      }
    }
  };
  for_each_task(plan.blocks.parts * plan.outputs.parts, plan.blocks.size * plan.row * plan.outputs.size,
                sums_bytes + table_bytes + pixel_bytes, compute);
}

}  // namespace nhwc::cpu
