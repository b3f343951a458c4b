#include "cpu/grouped.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/threads.h"

namespace nhwc::cpu {
namespace {

constexpr int64_t most_columns = 64, most_rows = 16;  // of a block, which is one thread's
constexpr int64_t ring_bytes = 16384;                 // half of a first-level cache
constexpr int64_t pixel_bytes = 128;                  // two cache lines

/// A tap of the kernel along an axis, and where it reads.
struct Tap {
  int64_t index, offset;
};

/// Position `p` of the output has the taps of phase `p % phases`; they read the source at
/// `p / phases * stride + offset`. Both passes have this form: the input gradient has a phase for each position within
/// a stride, and its source is the gradient of the output.
struct Axis {
  int64_t source, out, stride, kernel;
  std::vector<std::vector<Tap>> phases;

  int64_t phase_count() const { return static_cast<int64_t>(phases.size()); }
  int64_t positions(int64_t phase) const { return (out - phase + phase_count() - 1) / phase_count(); }
  const std::vector<Tap>& taps(int64_t position) const { return phases[position % phase_count()]; }
  int64_t first(int64_t position) const { return position / phase_count() * stride; }
  bool has(int64_t position) const { return 0 <= position && position < source; }
  /// Returns the positions of the source from the first to the last that an output position and its neighbours within
  /// a phase read.
  int64_t reach() const {
    int64_t first = std::numeric_limits<int64_t>::max(), last = std::numeric_limits<int64_t>::min();
    for (const auto& taps : phases) {
      for (const Tap& tap : taps) first = std::min(first, tap.offset), last = std::max(last, tap.offset);
    }
    return last < first ? 0 : last - first + 1;
  }
};

Axis forward_axis(const ConvolutionSizes& sizes, int axis) {
  Axis result{sizes.input[axis], sizes.output[axis], sizes.stride[axis], sizes.kernel[axis], {{}}};
  for (int64_t k = 0; k < sizes.kernel[axis]; ++k) {
    result.phases[0].push_back({k, k * sizes.dilation[axis] - sizes.padding[axis]});
  }
  return result;
}

Axis gradient_axis(const ConvolutionSizes& sizes, int axis) {
  const int64_t stride = sizes.stride[axis];
  Axis result{sizes.output[axis], sizes.input[axis], 1, sizes.kernel[axis], {}};
  result.phases.resize(stride);
  for (int64_t phase = 0; phase < stride; ++phase) {
    for (int64_t k = 0; k < sizes.kernel[axis]; ++k) {
      const int64_t distance = phase + sizes.padding[axis] - k * sizes.dilation[axis];
      if (distance % stride == 0) result.phases[phase].push_back({k, distance / stride});
    }
  }
  return result;
}

int64_t divide_up(int64_t size, int64_t part) { return (size + part - 1) / part; }

/// Equal ranges of at most `most` positions.
class Ranges {
 public:
  Ranges(int64_t size, int64_t most) : size_(size), count_(divide_up(size, most)) {}
  int64_t count() const { return count_; }
  int64_t begin(int64_t block) const { return size_ * block / count_; }

 private:
  int64_t size_, count_;
};

/// The source's columns under a block of output columns, those with the same remainder by the stride together.
struct Window {
  struct Column {
    int64_t tap, slot;
  };
  struct Run {
    int64_t first_column, slot;
  };
  int64_t begin, end;
  std::vector<std::vector<Column>> phases;  ///< the taps that read a column, and the slot of their first one
  std::vector<Run> runs;                    ///< each of `slots` columns
  int64_t slots = 0;
};

Window window_of(const Axis& axis, int64_t begin, int64_t end) {
  Window window{begin, end, std::vector<std::vector<Window::Column>>(axis.phase_count()), {}};
  std::vector<std::vector<Tap>> read(axis.phase_count());
  int64_t first = std::numeric_limits<int64_t>::max(), last = std::numeric_limits<int64_t>::min();
  for (int64_t phase = 0; phase < axis.phase_count(); ++phase) {
    const int64_t positions = std::min(end, axis.positions(phase)) - begin;
    for (const Tap& tap : axis.phases[phase]) {
      const int64_t from = begin * axis.stride + tap.offset, to = from + (positions - 1) * axis.stride;
      if (positions <= 0 || to < 0 || from >= axis.source) continue;
      first = std::min(first, from), last = std::max(last, to);
      read[phase].push_back({tap.index, from});
    }
  }
  window.slots = last < first ? 0 : (last - first) / axis.stride + 1;
  std::vector<int64_t> run_of(axis.stride, -1);
  for (int64_t phase = 0; phase < axis.phase_count(); ++phase) {
    for (const Tap& tap : read[phase]) {
      const int64_t remainder = (tap.offset - first) % axis.stride;
      if (run_of[remainder] < 0) {
        run_of[remainder] = window.runs.size() * window.slots;
        window.runs.push_back({first + remainder, run_of[remainder]});
      }
      window.phases[phase].push_back({tap.index, run_of[remainder] + (tap.offset - first) / axis.stride});
    }
  }
  return window;
}

/// A convolution of channels-last rows, with the weights packed for the kernels. A panel is the channels of one group,
/// or of as many groups as fit into a register.
class Convolution {
 public:
  Convolution(const GroupedKernels& kernels, const ConvolutionSizes& sizes, bool is_gradient)
      : kernels_(kernels),
        samples_(sizes.samples),
        groups_(sizes.groups),
        inputs_(is_gradient ? sizes.outputs : sizes.inputs),
        outputs_(is_gradient ? sizes.inputs : sizes.outputs),
        panel_groups_(std::clamp<int64_t>(kernels.lanes / outputs_, 1, groups_)) {
    for (int axis = 0; axis < 3; ++axis)
      axes_[axis] = is_gradient ? gradient_axis(sizes, axis) : forward_axis(sizes, axis);
  }

  int64_t panels() const { return divide_up(groups_, panel_groups_); }
  int64_t panel_groups() const { return panel_groups_; }
  int64_t groups_of(int64_t panel) const { return std::min(panel_groups_, groups_ - panel * panel_groups_); }
  int64_t taps() const { return axes_[0].kernel * axes_[1].kernel * axes_[2].kernel; }
  /// Returns the first weight of a panel, which are `[taps, inputs, channels]`.
  int64_t weights_of(int64_t panel) const { return panel * panel_groups_ * taps() * inputs_ * outputs_; }

  void run(const at::Tensor& source, const at::Tensor& weights, const at::Tensor& bias, const at::Tensor& out) const;

 private:
  bool is_spread() const { return panel_groups_ > 1; }
  int64_t pixel_numbers() const { return inputs_ * (is_spread() ? kernels_.lanes : 1); }
  int64_t row_numbers(const Window& window) const { return window.runs.size() * window.slots * pixel_numbers(); }
  void prefetch_row(const Window& window, const char* row, int64_t panels, int64_t element) const;
  void load_row(const Window& window, int64_t groups, const char* row, int64_t element, char* to) const;

  GroupedKernels kernels_;
  int64_t samples_, groups_, inputs_, outputs_, panel_groups_;
  Axis axes_[3];
};

/// Casts what a window has of a row of the source, with zeros outside of it.
void Convolution::load_row(const Window& window, int64_t groups, const char* row, int64_t element, char* to) const {
  const Axis& width = axes_[2];
  const int64_t pixel = groups_ * inputs_ * element, pixel_bytes = pixel_numbers() * kernels_.number_bytes;
  for (const Window::Run& run : window.runs) {
    const auto slot_of = [&](int64_t column) {
      return std::clamp<int64_t>(column <= run.first_column ? 0 : divide_up(column - run.first_column, width.stride), 0,
                                 window.slots);
    };
    const int64_t begin = slot_of(0), end = slot_of(width.source);
    char* first = to + run.slot * pixel_bytes;
    std::memset(first, 0, begin * pixel_bytes);
    std::memset(first + end * pixel_bytes, 0, (window.slots - end) * pixel_bytes);
    if (begin == end) continue;
    const char* from = row + (run.first_column + begin * width.stride) * pixel;
    const int64_t step = width.stride * groups_ * inputs_;
    if (is_spread()) {
      kernels_.spread(from, end - begin, groups, inputs_, outputs_, step, first + begin * pixel_bytes);
    } else {
      kernels_.cast(from, end - begin, inputs_, step, first + begin * pixel_bytes, inputs_);
    }
  }
}

/// Asks for some panels of what a window has of a row, whose pixels are too far from each other for a CPU to foresee.
void Convolution::prefetch_row(const Window& window, const char* row, int64_t panels, int64_t element) const {
  constexpr int64_t line = 64;
  const int64_t bytes = panels * panel_groups_ * inputs_ * element, pixel = groups_ * inputs_ * element;
  if (pixel <= 4 * line) return;
  int64_t begin = axes_[2].source, end = 0;
  for (const Window::Run& run : window.runs) {
    begin = std::min(begin, std::max<int64_t>(0, run.first_column));
    end = std::max(end, std::min(axes_[2].source, run.first_column + window.slots * axes_[2].stride));
  }
  for (int64_t column = begin; column < end; ++column) {
    for (int64_t byte = 0; byte < bytes; byte += line) __builtin_prefetch(row + column * pixel + byte);
  }
}

void Convolution::run(const at::Tensor& source, const at::Tensor& weights, const at::Tensor& bias,
                      const at::Tensor& out) const {
  const auto& [depth, height, width] = axes_;
  const int64_t element = source.element_size(), number = kernels_.number_bytes;
  int64_t most_taps = 0;
  for (const auto& taps : depth.phases) most_taps = std::max<int64_t>(most_taps, taps.size());
  // A row of the source stays while rows of the output read it.
  const int64_t ring = std::min(height.reach(), height.source);
  const Ranges rows(height.out, most_rows), columns(width.positions(0), most_columns);
  std::vector<Window> windows;
  int64_t row_size = 0;
  for (int64_t block = 0; block < columns.count(); ++block) {
    windows.push_back(window_of(width, columns.begin(block), columns.begin(block + 1)));
    row_size = std::max(row_size, row_numbers(windows.back()));
  }
  const int64_t ring_size = most_taps * ring * row_size;
  const int64_t sums_size = most_columns * (panel_groups_ * outputs_ + kernels_.lanes);
  // A pixel's panels, until they fill some cache lines, are read and written one after the other.
  const int64_t at_once = std::clamp<int64_t>(
      std::min(pixel_bytes / (panel_groups_ * inputs_ * element), ring_bytes / (ring_size * number + 1)), 1, panels());
  const Ranges panel_blocks(panels(), at_once);
  const int64_t scratch_size = at_once * ring_size + sums_size;
  const at::Tensor scratch = at::empty({at::get_num_threads(), scratch_size * number}, at::kByte);

  const auto* from = static_cast<const char*>(source.const_data_ptr());
  const auto* packed = static_cast<const char*>(weights.const_data_ptr());
  const auto* biases = static_cast<const char*>(bias.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());

  const auto compute = [&](int64_t sample, int64_t plane, int64_t row_block, const Window& window, int64_t panel_block,
                           char* rings, std::vector<int64_t>& loaded, std::vector<GroupedTap>& lines,
                           std::vector<GroupedTap>& taps) {
    const int64_t first_panel = panel_blocks.begin(panel_block), end_panel = panel_blocks.begin(panel_block + 1);
    std::fill(loaded.begin(), loaded.end(), -1);
    for (int64_t row = rows.begin(row_block); row < rows.begin(row_block + 1); ++row) {
      lines.clear();
      const auto& plane_taps = depth.taps(plane);
      for (size_t p = 0; p < plane_taps.size(); ++p) {
        const int64_t source_plane = depth.first(plane) + plane_taps[p].offset;
        if (!depth.has(source_plane)) continue;
        for (const Tap& tap : height.taps(row)) {
          const int64_t source_row = height.first(row) + tap.offset;
          if (!height.has(source_row)) continue;
          const int64_t slot = p * ring + source_row % ring;
          if (loaded[slot] != source_row) {
            const int64_t pixel = ((sample * depth.source + source_plane) * height.source + source_row) * width.source;
            const char* first = from + (pixel * groups_ + first_panel * panel_groups_) * inputs_ * element;
            for (int64_t panel = first_panel; panel < end_panel; ++panel) {
              load_row(window, groups_of(panel), first + (panel - first_panel) * panel_groups_ * inputs_ * element,
                       element, rings + ((panel - first_panel) * ring_size + slot * row_size) * number);
            }
            prefetch_row(window, first + height.stride * width.source * groups_ * inputs_ * element,
                         end_panel - first_panel, element);
            loaded[slot] = source_row;
          }
          lines.push_back({slot * row_size, (plane_taps[p].index * height.kernel + tap.index) * width.kernel});
        }
      }
      for (int64_t phase = 0; phase < width.phase_count(); ++phase) {
        const int64_t pixels = std::min(window.end, width.positions(phase)) - window.begin;
        if (pixels <= 0) continue;
        const int64_t pixel =
            ((sample * depth.out + plane) * height.out + row) * width.out + window.begin * width.phase_count() + phase;
        for (int64_t panel = first_panel; panel < end_panel; ++panel) {
          const int64_t first_group = panel * panel_groups_, channels = groups_of(panel) * outputs_;
          taps.clear();
          for (const GroupedTap& line : lines) {
            for (const Window::Column& column : window.phases[phase]) {
              taps.push_back(
                  {line.pixel + column.slot * pixel_numbers(), (line.weight + column.tap) * inputs_ * channels});
            }
          }
          const int64_t tap_count = taps.size();
          kernels_.sum({pixels, inputs_, channels, is_spread(), taps.data(), tap_count,
                        rings + (panel - first_panel) * ring_size * number, packed + weights_of(panel) * number,
                        biases + first_group * outputs_ * number,
                        to + (pixel * groups_ + first_group) * outputs_ * element,
                        width.phase_count() * groups_ * outputs_, rings + at_once * ring_size * number});
        }
      }
    }
  };

  constexpr int64_t products_worth_a_thread = 1 << 18;
  const int64_t products =
      most_rows * std::min(most_columns, width.out) * at_once * panel_groups_ * outputs_ * inputs_ * taps();
  const int64_t blocks = samples_ * depth.out * rows.count() * columns.count() * panel_blocks.count();
  at::parallel_for(0, blocks, std::max<int64_t>(1, products_worth_a_thread / (products + 1)),
                   [&](int64_t begin, int64_t end) {
                     auto* own_scratch =
                         static_cast<char*>(scratch.mutable_data_ptr()) + at::get_thread_num() * scratch_size * number;
                     std::vector<int64_t> loaded(most_taps * ring);
                     std::vector<GroupedTap> lines, taps;
                     for (int64_t block = begin; block < end; ++block) {
                       const int64_t panel_block = block % panel_blocks.count();
                       const int64_t column_block = block / panel_blocks.count() % columns.count();
                       const int64_t row_block = block / (panel_blocks.count() * columns.count()) % rows.count();
                       const int64_t plane = block / (panel_blocks.count() * columns.count() * rows.count());
                       compute(plane / depth.out, plane % depth.out, row_block, windows[column_block], panel_block,
                               own_scratch, loaded, lines, taps);
                     }
                   });
}

/// Returns room for numbers of the kernels, and a register more.
at::Tensor numbers_for(const GroupedKernels& kernels, int64_t count) {
  return at::empty({count + kernels.lanes}, kernels.number_bytes == sizeof(double) ? at::kDouble : at::kFloat);
}

}  // namespace

void grouped_forward(const ConvolutionSizes& sizes, const at::Tensor& input, const at::Tensor& weight,
                     const at::Tensor& bias, const at::Tensor& out) {
  if (out.numel() == 0) return;
  const GroupedKernels& kernels = of_type(grouped_kernels(), input.scalar_type());
  const Convolution convolution(kernels, sizes, false);
  const at::Tensor weights = numbers_for(kernels, weight.numel()), biases = numbers_for(kernels, out.size(1)).zero_();
  if (bias.defined()) kernels.cast(bias.const_data_ptr(), 1, bias.numel(), 0, biases.mutable_data_ptr(), 0);
  const auto* from = static_cast<const char*>(weight.const_data_ptr());
  auto* to = static_cast<char*>(weights.mutable_data_ptr());
  const FilterKernels::Transpose transpose = number_transposes(input.scalar_type()).to_numbers;
  const int64_t columns = convolution.taps() * sizes.inputs;
  const int64_t grain = std::max<int64_t>(1, elements_worth_a_thread / (convolution.weights_of(1) + 1));
  at::parallel_for(0, convolution.panels(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = convolution.weights_of(panel);
      transpose(from + first * weight.element_size(), to + first * kernels.number_bytes, 1,
                convolution.groups_of(panel) * sizes.outputs, columns, false);
    }
  });
  convolution.run(input, weights, biases, out);
}

void grouped_input_gradient(const ConvolutionSizes& sizes, const at::Tensor& grad, const at::Tensor& weight,
                            const at::Tensor& grad_input) {
  if (grad_input.numel() == 0) return;
  const GroupedKernels& kernels = of_type(grouped_kernels(), grad.scalar_type());
  const Convolution convolution(kernels, sizes, true);
  const at::Tensor weights = numbers_for(kernels, weight.numel());
  const at::Tensor zeros = numbers_for(kernels, grad_input.size(1)).zero_();
  const auto* from = static_cast<const char*>(weight.const_data_ptr());
  auto* to = static_cast<char*>(weights.mutable_data_ptr());
  const int64_t filter = convolution.taps() * sizes.inputs;
  const int64_t grain = std::max<int64_t>(1, elements_worth_a_thread / (convolution.weights_of(1) + 1));
  at::parallel_for(0, convolution.panels(), grain, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = convolution.weights_of(panel), groups = convolution.groups_of(panel);
      for (int64_t group = 0; group < groups; ++group) {
        for (int64_t tap = 0; tap < convolution.taps(); ++tap) {
          const int64_t source = first + group * sizes.outputs * filter + tap * sizes.inputs;
          const int64_t packed = first + (tap * sizes.outputs * groups + group) * sizes.inputs;
          kernels.cast(from + source * weight.element_size(), sizes.outputs, sizes.inputs, filter,
                       to + packed * kernels.number_bytes, groups * sizes.inputs);
        }
      }
    }
  });
  convolution.run(grad, weights, zeros, grad_input);
}

}  // namespace nhwc::cpu
