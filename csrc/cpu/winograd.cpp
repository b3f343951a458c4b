// A tile is a few neighbouring results and the input under their taps. Transformed, both are as many points as the
// input has positions, and each point is a product by itself: of all tiles' inputs and the weight, `[tiles, inputs] x
// [inputs, outputs]`.
//
// A task is a block of tiles, whose points stay in the second cache or near it. Each sum has the same terms in the same
// order on any number of threads.
#include "cpu/winograd.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/work/ranges.h"

namespace nhwc::cpu {
namespace {

/// For a cache of about 1 MiB, not those of this CPU, on which the results would depend.
constexpr int64_t floats_of_block = 1 << 16, least_tiles = 24, most_tiles = 96, most_outputs = 128;
constexpr int64_t floats_of_weight = 1 << 18;  // that are read again for each block; of more, for fewer blocks
constexpr int64_t most_floats = 1 << 21;       // of scratch memory
constexpr int64_t channels_of_sums = 64;       // of the weight's gradient in a task
constexpr int64_t line = 16;                   // floats, between points, which otherwise share sets of a cache

/// Results and what they are computed from, `[samples, depth, height, width, channels]`. Under three taps, the tile of
/// result 0 begins with position `begin` of the source.
struct Plane {
  int64_t samples;
  int64_t source[3], results[3], begin[3];
};

Plane forward_plane(const ConvolutionSizes& sizes) {
  Plane plane{sizes.samples, {}, {}, {}};
  for (int axis = 0; axis < 3; ++axis) {
    plane.source[axis] = sizes.input[axis];
    plane.results[axis] = sizes.output[axis];
    plane.begin[axis] = -sizes.padding[axis];
  }
  return plane;
}

/// The gradient of the input is a convolution of the output's, by the taps in reverse.
Plane gradient_plane(const ConvolutionSizes& sizes) {
  Plane plane{sizes.samples, {}, {}, {}};
  for (int axis = 0; axis < 3; ++axis) {
    plane.source[axis] = sizes.output[axis];
    plane.results[axis] = sizes.input[axis];
    plane.begin[axis] = sizes.padding[axis] - (sizes.kernel[axis] - 1);
  }
  return plane;
}

/// The tiles of a plane, in the order of its memory.
class Tiles {
 public:
  Tiles(const Plane& plane, const WinogradTile& tile) : plane_(plane), tile_(tile) {
    for (int axis = 0; axis < 3; ++axis) count_[axis] = divide_up(plane.results[axis], tile.results[axis]);
  }

  int64_t count() const { return plane_.samples * count_[0] * count_[1] * count_[2]; }

  WinogradBox source_of(int64_t index, const char* source, int64_t element, int64_t channels, int64_t all) const {
    int64_t sides[] = {tile_.side(0), tile_.side(1), tile_.side(2)};
    return box(index, source, element, plane_.source, plane_.begin, sides, channels, all);
  }
  WinogradBox results_of(int64_t index, const char* results, int64_t element, int64_t channels, int64_t all) const {
    constexpr int64_t none[3] = {};
    return box(index, results, element, plane_.results, none, tile_.results, channels, all);
  }

 private:
  /// Returns the positions of a tile in an array that begins with some channel of `all`.
  WinogradBox box(int64_t index, const char* array, int64_t element, const int64_t* sizes, const int64_t* begin,
                  const int64_t* sides, int64_t channels, int64_t all) const {
    WinogradBox box{
        .first = nullptr, .step = {sizes[1] * sizes[2] * all, sizes[2] * all, all}, .inside = {}, .channels = channels};
    int64_t offset = 0;
    for (int axis = 2; axis >= 0; --axis) {
      const int64_t first = index % count_[axis] * tile_.results[axis] + begin[axis];
      index /= count_[axis];
      offset += first * box.step[axis];
      box.inside[axis] = indexes_within(first, 1, sides[axis], 0, sizes[axis]);
    }
    box.first = array + (index * sizes[0] * box.step[0] + offset) * element;
    return box;
  }

  Plane plane_;
  WinogradTile tile_;
  int64_t count_[3];
};

const char* bytes_of(const at::Tensor& tensor) { return static_cast<const char*>(tensor.const_data_ptr()); }

const WinogradKernels& kernels_of(at::ScalarType type) { return of_type(level_kernels().winograd, type); }

int64_t panels_of(int64_t channels) { return divide_up(channels, kernels_of(at::kFloat).lanes); }

/// Memory for arrays `[points][floats of a point]`.
struct PointArray {
  int64_t point_step;
  explicit PointArray(int64_t floats_of_point) : point_step(round_up(floats_of_point, line) + line) {}
  int64_t floats(const WinogradTile& tile) const { return tile.points() * point_step; }
};

/// The weight's points, `[points][panels of results][source channels][lanes]`.
struct Weight {
  PointArray array;
  int64_t panel_step;
  c10::DataPtr memory;
  float* first;
};

WinogradBox taps_of(const WinogradTile& tile, const void* first, int64_t tap_step, int64_t channels) {
  const int64_t taps[] = {tile.taps(0), tile.taps(1), tile.taps(2)};
  return {.first = first,
          .step = {taps[1] * taps[2] * tap_step, taps[2] * tap_step, tap_step},
          .inside = {{0, taps[0]}, {0, taps[1]}, {0, taps[2]}},
          .channels = channels};
}

Weight empty_weight(const WinogradTile& tile, int64_t source_channels, int64_t result_channels) {
  const int64_t panel_step = source_channels * kernels_of(at::kFloat).lanes;
  const PointArray array(panels_of(result_channels) * panel_step);
  c10::DataPtr memory = c10::GetCPUAllocator()->allocate(array.floats(tile) * sizeof(float));
  auto* first = static_cast<float*>(memory.get());
  return {array, panel_step, std::move(memory), first};
}

/// Transforms a weight, `[outputs, taps, inputs]`: a panel of outputs is transposed to `[taps, inputs, outputs]`.
Weight transformed(const ConvolutionSizes& sizes, const WinogradTile& tile, const at::Tensor& weight) {
  const int64_t lanes = kernels_of(at::kFloat).lanes, row = sizes.taps() * sizes.inputs,
                element = weight.element_size();
  const NumberTransposes transposes = number_transposes(weight.scalar_type());
  Weight points = empty_weight(tile, sizes.inputs, sizes.outputs);
  for_each_task(panels_of(sizes.outputs), lanes * row * products_of_element, row * lanes * sizeof(float),
                [&](int64_t panel, char* scratch) {
                  const int64_t first = panel * lanes, outputs = std::min(lanes, sizes.outputs - first);
                  transposes.to_numbers(bytes_of(weight) + first * row * element, scratch, 1, outputs, row, false);
                  for (int64_t input = 0; input < sizes.inputs; ++input) {
                    const auto* from = reinterpret_cast<const float*>(scratch) + input * outputs;
                    float* to = points.first + panel * points.panel_step + input * lanes;
                    kernels_of(at::kFloat)
                        .weight_to_points(tile, taps_of(tile, from, sizes.inputs * outputs, outputs),
                                          {.first = to, .point_step = points.array.point_step, .panel_step = 0});
                  }
                });
  return points;
}

/// Transforms a weight for the gradient of the input: its taps in reverse, from outputs to inputs.
Weight transformed_in_reverse(const ConvolutionSizes& sizes, const WinogradTile& tile, const at::Tensor& weight) {
  const int64_t lanes = kernels_of(at::kFloat).lanes, taps = sizes.taps(), element = weight.element_size();
  Weight points = empty_weight(tile, sizes.outputs, sizes.inputs);
  for_each_task(sizes.outputs, taps * sizes.inputs * products_of_element, 0, [&](int64_t output, char*) {
    const char* last_tap = bytes_of(weight) + ((output + 1) * taps - 1) * sizes.inputs * element;
    kernels_of(weight.scalar_type())
        .weight_to_points(tile, taps_of(tile, last_tap, -sizes.inputs, sizes.inputs),
                          {.first = points.first + output * lanes,
                           .point_step = points.array.point_step,
                           .panel_step = points.panel_step});
  });
  return points;
}

/// Returns the channels of a group of an activation.
at::Tensor channels_of(const at::Tensor& activation, int64_t groups, int64_t group) {
  const int64_t count = activation.size(1) / groups;
  return activation.narrow(1, group * count, count);
}

/// Returns the part of a group of a weight or a bias, which may be undefined.
at::Tensor outputs_of(const at::Tensor& weight, int64_t groups, int64_t group) {
  if (!weight.defined()) return weight;
  const int64_t count = weight.size(0) / groups;
  return weight.narrow(0, group * count, count);
}

/// Returns a convolution's results of one group, by the points of its weight.
void convolve(const Plane& plane, int64_t groups, const WinogradTile& tile, const at::Tensor& source,
              const Weight& weight, const at::Tensor& bias, const at::Tensor& results, const Output& output) {
  const WinogradKernels& kernels = kernels_of(source.scalar_type());
  const int64_t inputs = source.size(1), outputs = results.size(1), lanes = kernels.lanes,
                element = source.element_size();
  const Tiles tiles(plane, tile);
  const at::Tensor biases = bias.defined() ? bias.to(at::kFloat).contiguous() : bias;
  const int64_t depth = panels_of(inputs) * lanes;                                    // of a row of the source's points
  const int64_t of_tile = tile.points() * (depth + std::min(outputs, most_outputs));  // floats
  const int64_t least = weight.array.floats(tile) > floats_of_weight ? 2 * least_tiles : least_tiles;
  const int64_t fitting = std::clamp(floats_of_block / of_tile, least, most_tiles);
  const int64_t limit = std::max<int64_t>(1, most_floats / of_tile), rows = std::min(kernels.rows_at_once, limit);
  const Parts blocks(tiles.count(), std::min(fitting, limit / rows * rows), rows);
  const int64_t products = blocks.size * tile.points() * inputs * outputs;
  // Threads share a block where there are fewer, and each transforms its input.
  const int64_t sharing = divide_up(threads_worth(products * blocks.parts), blocks.parts);
  const Parts shares(outputs, std::max(2 * lanes, divide_up(outputs, sharing)), 2 * lanes);
  const int64_t most = std::min(shares.size, most_outputs);
  const PointArray of_source(blocks.size * depth), of_results(blocks.size * panels_of(most) * lanes);
  const int64_t floats = of_source.floats(tile) + of_results.floats(tile);

  const bool finishes = !output.is_empty();
  const auto finish = [&](const WinogradBox& box) {
    const int64_t neighbours = box.step[2] == box.channels ? box.inside[2].size() : 1;
    for (int64_t d = box.inside[0].begin; d < box.inside[0].end; ++d) {
      for (int64_t h = box.inside[1].begin; h < box.inside[1].end; ++h) {
        for (int64_t w = box.inside[2].begin; w < box.inside[2].end; w += neighbours) {
          const int64_t offset = d * box.step[0] + h * box.step[1] + w * box.step[2];
          output.finish(results, static_cast<const float*>(box.first) + offset, neighbours * box.channels);
        }
      }
    }
  };
  const auto compute = [&](int64_t task, char* scratch) {
    const Range block = blocks[task / shares.parts], share = shares[task % shares.parts];
    auto* from = reinterpret_cast<float*>(scratch);
    float* to = from + of_source.floats(tile);
    const int64_t panel_step = blocks.size * lanes;  // of the results' points
    for (int64_t index = block.begin; index < block.end; ++index) {
      const WinogradBox box = tiles.source_of(index, bytes_of(source), element, inputs, groups * inputs);
      kernels.input_to_points(tile, box, {from + (index - block.begin) * depth, of_source.point_step, lanes});
    }
    for (int64_t first = share.begin; first < share.end; first += most) {
      const Range part = {first, std::min(first + most, share.end)};
      for (int64_t point = 0; point < tile.points(); ++point) {
        kernels.multiply({.a = from + point * of_source.point_step,
                          .a_row_step = depth,
                          .a_depth_step = 1,
                          .b = weight.first + point * weight.array.point_step + part.begin / lanes * weight.panel_step,
                          .b_panel_step = weight.panel_step,
                          .c = to + point * of_results.point_step,
                          .c_panel_step = panel_step,
                          .rows = block.size(),
                          .depth = inputs,
                          .panels = panels_of(part.size()),
                          .terms = tile.terms,
                          .adds = false});
      }
      if (biases.defined()) {
        float* common = to + tile.common_point() * of_results.point_step;
        for (int64_t output = 0; output < part.size(); ++output) {
          const float value = biases.const_data_ptr<float>()[part.begin + output];
          float* lane = common + output / lanes * panel_step + output % lanes;
          for (int64_t row = 0; row < block.size(); ++row) lane[row * lanes] += value;
        }
      }
      for (int64_t index = block.begin; index < block.end; ++index) {
        const WinogradBox box =
            tiles.results_of(index, bytes_of(results) + part.begin * element, element, part.size(), groups * outputs);
        kernels.points_to_results(tile, {to + (index - block.begin) * lanes, of_results.point_step, panel_step}, box);
        if (finishes) finish(box);
      }
    }
  };
  for_each_task(blocks.parts * shares.parts, products / shares.parts, floats * sizeof(float), compute);
}

/// Returns a convolution's results, one group after the other, by a transform of a group's weight.
void convolve_groups(const Plane& plane, const ConvolutionSizes& sizes, const WinogradTile& tile,
                     const at::Tensor& source, const at::Tensor& weight, decltype(transformed)& transform,
                     const at::Tensor& bias, const at::Tensor& results, const Output& output = {}) {
  for (int64_t group = 0; group < sizes.groups; ++group) {
    const Weight points = transform(sizes, tile, outputs_of(weight, sizes.groups, group));
    Output of_group = output;
    if (output.residual.defined()) of_group.residual = channels_of(output.residual, sizes.groups, group);
    convolve(plane, sizes.groups, tile, channels_of(source, sizes.groups, group), points,
             outputs_of(bias, sizes.groups, group), channels_of(results, sizes.groups, group), of_group);
  }
}

/// The gradient of the weight of a group: each of its points is a product of the gradient's and the input's, summed
/// over tiles.
class PointsOfWeightGradient {
 public:
  PointsOfWeightGradient(const ConvolutionSizes& sizes, const WinogradTile& tile, const at::Tensor& grad,
                         const at::Tensor& input, const at::Tensor& grad_weight, const at::Tensor& grad_bias)
      : sizes_(sizes),
        tile_(tile),
        kernels_(kernels_of(input.scalar_type())),
        grad_(grad),
        input_(input),
        grad_weight_(grad_weight),
        grad_bias_(grad_bias),
        tiles_(forward_plane(sizes), tile),
        inputs_(sizes.inputs, channels_of_sums, kernels_.lanes),
        outputs_(sizes.outputs, channels_of_sums, kernels_.lanes),
        blocks_(tiles_.count(), tiles_of_block),
        ranges_(blocks_.parts, std::max(blocks_worth_a_range, divide_up(blocks_.parts, enough_ranges()))),
        of_input_(blocks_.size * panels_of(inputs_.size) * kernels_.lanes),
        of_grad_(blocks_.size * panels_of(outputs_.size) * kernels_.lanes),
        of_sums_(panels_of(inputs_.size) * outputs_.size * kernels_.lanes) {}

  void compute() const {
    const int64_t ranges = ranges_.parts, points = of_input_.floats(tile_) + of_grad_.floats(tile_);
    const int64_t products = blocks_.size * ranges_.size * tile_.points() * inputs_.size * outputs_.size;
    if (tasks() >= threads_worth(products * ranges * tasks())) {
      for_each_task(tasks(), products * ranges, (points + 2 * sums()) * sizeof(float),
                    [&](int64_t task, char* scratch) {
                      auto* first = reinterpret_cast<float*>(scratch);
                      float* total = first + points;
                      for (int64_t range = 0; range < ranges; ++range) {
                        add(task, range, first, range == 0 ? total : total + sums());
                        if (range > 0) add_up_parts<float>(total, 2, sums());
                      }
                      write(task, total);
                    });
      return;
    }
    const c10::DataPtr memory = c10::GetCPUAllocator()->allocate(tasks() * ranges * sums() * sizeof(float));
    auto* all_sums = static_cast<float*>(memory.get());
    for_each_task(tasks() * ranges, products, points * sizeof(float), [&](int64_t i, char* scratch) {
      add(i / ranges, i % ranges, reinterpret_cast<float*>(scratch), all_sums + i * sums());
    });
    for_each_task(tasks(), products, 0, [&](int64_t task, char*) {
      float* first = all_sums + task * ranges * sums();
      add_up_parts<float>(first, ranges, sums());
      write(task, first);
    });
  }

 private:
  static constexpr int64_t tiles_of_block = 48, blocks_worth_a_range = 2;

  int64_t tasks() const { return inputs_.parts * outputs_.parts; }
  int64_t enough_ranges() const { return divide_up(enough_tasks, tasks()); }
  int64_t sums() const { return of_sums_.floats(tile_) + outputs_.size; }

  /// Computes the sums of a task over a range of blocks: `[points][panels of inputs][outputs][lanes]`, and the bias.
  void add(int64_t task, int64_t range, float* scratch, float* sums) const {
    const Range in = inputs_[task / outputs_.parts], out = outputs_[task % outputs_.parts];
    const int64_t lanes = kernels_.lanes, element = input_.element_size(), row = panels_of(out.size()) * lanes;
    float *of_input = scratch, *of_grad = scratch + of_input_.floats(tile_), *bias = sums + of_sums_.floats(tile_);
    std::fill_n(bias, outputs_.size, 0.0F);
    for (int64_t block = ranges_[range].begin; block < ranges_[range].end; ++block) {
      const Range tiles = blocks_[block];
      for (int64_t index = tiles.begin; index < tiles.end; ++index) {
        const int64_t at = index - tiles.begin;
        kernels_.input_to_points(tile_,
                                 tiles_.source_of(index, bytes_of(input_) + in.begin * element, element, in.size(),
                                                  sizes_.groups * sizes_.inputs),
                                 {of_input + at * lanes, of_input_.point_step, blocks_.size * lanes});
        kernels_.gradient_to_points(tile_,
                                    tiles_.results_of(index, bytes_of(grad_) + out.begin * element, element, out.size(),
                                                      sizes_.groups * sizes_.outputs),
                                    {of_grad + at * row, of_grad_.point_step, lanes});
      }
      for (int64_t point = 0; point < tile_.points(); ++point) {
        kernels_.multiply({.a = of_grad + point * of_grad_.point_step,
                           .a_row_step = 1,
                           .a_depth_step = row,
                           .b = of_input + point * of_input_.point_step,
                           .b_panel_step = blocks_.size * lanes,
                           .c = sums + point * of_sums_.point_step,
                           .c_panel_step = outputs_.size * lanes,
                           .rows = out.size(),
                           .depth = tiles.size(),
                           .panels = panels_of(in.size()),
                           .terms = tile_.terms,
                           .adds = block > ranges_[range].begin});
      }
      if (!grad_bias_.defined() || in.begin > 0) continue;
      const float* common = of_grad + tile_.common_point() * of_grad_.point_step;
      for (int64_t output = 0; output < out.size(); ++output) {
        double sum = 0;
        for (int64_t at = 0; at < tiles.size(); ++at) sum += common[at * row + output];
        bias[output] += static_cast<float>(sum);
      }
    }
  }

  void write(int64_t task, const float* sums) const {
    const Range in = inputs_[task / outputs_.parts], out = outputs_[task % outputs_.parts];
    const int64_t element = input_.element_size(), taps = sizes_.taps(), lanes = kernels_.lanes;
    for (int64_t output = 0; output < out.size(); ++output) {
      const char* to = bytes_of(grad_weight_) + ((out.begin + output) * taps * sizes_.inputs + in.begin) * element;
      kernels_.points_to_weight(tile_,
                                {const_cast<float*>(sums) + output * lanes, of_sums_.point_step, outputs_.size * lanes},
                                taps_of(tile_, to, sizes_.inputs, in.size()));
    }
    if (!grad_bias_.defined() || in.begin > 0) return;
    const float* bias = sums + of_sums_.floats(tile_);
    auto* to = static_cast<char*>(grad_bias_.mutable_data_ptr()) + out.begin * element;
    of_type(level_kernels().weight_gradient, grad_bias_.scalar_type()).write(bias, 0, 1, out.size(), to, 0);
  }

  const ConvolutionSizes& sizes_;
  const WinogradTile tile_;
  const WinogradKernels& kernels_;
  const at::Tensor grad_, input_, grad_weight_, grad_bias_;
  Tiles tiles_;
  Parts inputs_, outputs_;  // of tasks
  Parts blocks_, ranges_;   // of tiles, and of blocks
  PointArray of_input_, of_grad_, of_sums_;
};

}  // namespace

void winograd_forward(const ConvolutionSizes& sizes, const WinogradTile& tile, const at::Tensor& input,
                      const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& out, const Output& output) {
  if (out.numel() == 0) return;
  convolve_groups(forward_plane(sizes), sizes, tile, input, weight, transformed, bias, out, output);
}

void winograd_input_gradient(const ConvolutionSizes& sizes, const WinogradTile& tile, const at::Tensor& grad,
                             const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& grad_input) {
  if (grad_input.numel() == 0) return;
  convolve_groups(gradient_plane(sizes), sizes, tile, grad, weight, transformed_in_reverse, bias, grad_input);
}

void winograd_weight_gradient(const ConvolutionSizes& sizes, const WinogradTile& tile, const at::Tensor& grad,
                              const at::Tensor& input, const at::Tensor& grad_weight, const at::Tensor& grad_bias) {
  if (grad.numel() == 0 || input.numel() == 0) {
    grad_weight.zero_();
    if (grad_bias.defined()) grad_bias.zero_();
    return;
  }
  for (int64_t group = 0; group < sizes.groups; ++group) {
    const auto of_group = [&](const at::Tensor& each) { return outputs_of(each, sizes.groups, group); };
    PointsOfWeightGradient(sizes, tile, channels_of(grad, sizes.groups, group), channels_of(input, sizes.groups, group),
                           of_group(grad_weight), of_group(grad_bias))
        .compute();
  }
}

}  // namespace nhwc::cpu
