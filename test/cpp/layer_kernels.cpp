// The CPU kernels of convolutions, norms and softmax by themselves, for random sizes, against PyTorch's float64.
// Tensors have memory of their exact size, beyond which the address sanitizer watches. Driven by test_cpp.py. Prints
// "ok".
//
//   layer_kernels [count]  takes so many of each kind and dtype
#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/depthwise.h"
#include "cpu/group_norm.h"
#include "cpu/inner_product.h"
#include "cpu/pointwise.h"
#include "cpu/pointwise_kernels.h"
#include "cpu/softmax.h"
#include "cpu/weight_gradient.h"
#include "cpu/winograd.h"
#include "cpu/work/rows.h"

namespace {

using nhwc::cpu::ConvolutionSizes;
using nhwc::cpu::GroupNormShape;

std::mt19937 generator(0);  // NOLINT: the same cases in every run

int64_t one_of(const std::vector<int64_t>& values) { return values[generator() % values.size()]; }
int64_t between(int64_t least, int64_t most) { return least + static_cast<int64_t>(generator() % (most - least + 1)); }

at::Tensor random(at::IntArrayRef sizes, at::ScalarType type) {
  return at::randn(sizes, at::kDouble).to(type).contiguous(at::MemoryFormat::ChannelsLast3d);
}

/// Returns memory of not-a-numbers, of which none may be left.
at::Tensor unwritten(at::IntArrayRef sizes, at::ScalarType type) {
  return at::empty(sizes, at::TensorOptions(type).memory_format(at::MemoryFormat::ChannelsLast3d)).fill_(NAN);
}

at::Tensor reference(const at::Tensor& tensor) { return tensor.to(at::kDouble).contiguous(); }

/// Expects a result of our kernels within the rounding errors of its dtype.
void expect(const at::Tensor& actual, const at::Tensor& expected, at::ScalarType type, const std::string& what) {
  if (actual.numel() == 0) return;
  const double tolerance = type == at::kDouble ? 1e-9 : type == at::kFloat ? 1e-4 : type == at::kHalf ? 4e-3 : 3e-2;
  const double error = (actual.to(at::kDouble) - expected).abs().max().item<double>();
  const double largest = expected.abs().max().item<double>();
  if (error <= tolerance * (1 + largest)) return;
  std::fprintf(stderr, "failed: %s, error %g, largest value %g\n", what.c_str(), error, largest);
  std::exit(1);
}

/// Draws an axis whose output has a position.
void draw_axis(ConvolutionSizes& sizes, int axis, int64_t longest) {
  do {
    sizes.input[axis] = one_of({1, 1, 2, 3, between(1, longest)});
    sizes.kernel[axis] = one_of({1, 2, 3, 3, between(1, 8)});
    sizes.stride[axis] = one_of({1, 1, 2, 3});
    sizes.dilation[axis] = one_of({1, 1, 2, 3});
    sizes.padding[axis] = between(0, sizes.kernel[axis]);
    const int64_t reach = (sizes.kernel[axis] - 1) * sizes.dilation[axis];
    sizes.output[axis] = sizes.input[axis] + 2 * sizes.padding[axis] - reach - 1;
    if (sizes.output[axis] >= 0) sizes.output[axis] = sizes.output[axis] / sizes.stride[axis] + 1;
  } while (sizes.output[axis] < 1);
}

enum class Kind { depthwise, grouped, inner_product, pointwise, winograd };

ConvolutionSizes draw_convolution(Kind kind) {
  ConvolutionSizes sizes{one_of({0, 1, 1, 2, 3}), 1, 1, 1, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {}, {1, 1, 1}};
  if (kind == Kind::pointwise) {
    const int64_t few = between(1, nhwc::cpu::most_few),
                  many = one_of({1, 4, 16, between(1, 70), nhwc::cpu::most_pointwise_channels});
    const bool has_few_outputs = one_of({0, 1}) == 1;
    sizes.inputs = has_few_outputs ? many : few;
    sizes.outputs = has_few_outputs ? few : many;
    sizes.input[2] = sizes.output[2] = one_of({1, 2, between(1, 200), between(4000, 9000)});
    return sizes;
  }
  if (kind == Kind::winograd) {
    sizes.inputs = one_of({1, 16, between(1, 70), between(60, 140)});
    sizes.outputs = one_of({1, 16, between(1, 70), between(60, 140)});
    for (int axis = one_of({0, 1}); axis < 3; ++axis) {
      sizes.kernel[axis] = axis == 2 ? 3 : one_of({1, 3, 3});
      sizes.padding[axis] = sizes.kernel[axis] == 1 ? 0 : between(0, 2);
      sizes.output[axis] = between(1, 9);
      sizes.input[axis] = std::max<int64_t>(1, sizes.output[axis] + sizes.kernel[axis] - 1 - 2 * sizes.padding[axis]);
      sizes.output[axis] = sizes.input[axis] + 2 * sizes.padding[axis] - sizes.kernel[axis] + 1;
    }
    return sizes;
  }
  if (kind == Kind::depthwise) {
    sizes.groups = one_of({1, 3, 8, 16, between(1, 70)});
    sizes.outputs = one_of({1, 1, 2, 3});
  } else if (kind == Kind::inner_product) {
    sizes.inputs = one_of({1, 3, 16, between(1, 70), between(60, 140), 1024, between(1000, 2100)});
    sizes.outputs = one_of({1, 3, 16, between(1, 40)});
  } else {
    sizes.groups = one_of({1, 2, 3, between(1, 20)});
    sizes.inputs = one_of({1, 2, 4, 7, between(1, sizes.groups == 1 ? 70 : 20)});
    sizes.outputs = one_of({1, 2, 4, 7, between(1, sizes.groups == 1 ? 70 : 20)});
  }
  if (one_of({0, 1}) == 1) draw_axis(sizes, 0, 5);
  draw_axis(sizes, 1, 12);
  draw_axis(sizes, 2, kind == Kind::inner_product ? 12 : one_of({12, 80}));
  return sizes;
}

void check_convolution(at::ScalarType type, Kind kind) {
  const ConvolutionSizes sizes = draw_convolution(kind);
  const bool is_depthwise = kind == Kind::depthwise;
  const bool has_bias = one_of({0, 1}) == 1;
  std::ostringstream text;
  text << type
       << (is_depthwise              ? ", depthwise"
           : kind == Kind::pointwise ? ", pointwise"
           : kind == Kind::winograd  ? ", winograd"
           : kind == Kind::grouped   ? ""
                                     : ", inner products")
       << ", samples " << sizes.samples << ", groups " << sizes.groups << " of " << sizes.inputs << " to "
       << sizes.outputs << ", input, kernel, stride, padding, dilation:";
  for (int axis = 0; axis < 3; ++axis) {
    text << " (" << sizes.input[axis] << ' ' << sizes.kernel[axis] << ' ' << sizes.stride[axis] << ' '
         << sizes.padding[axis] << ' ' << sizes.dilation[axis] << ')';
  }
  const std::string what = text.str();

  const auto& [in, out, kernel] = std::tie(sizes.input, sizes.output, sizes.kernel);
  const int64_t channels = sizes.groups * sizes.outputs;
  const at::Tensor input = random({sizes.samples, sizes.groups * sizes.inputs, in[0], in[1], in[2]}, type),
                   weight = random({channels, sizes.inputs, kernel[0], kernel[1], kernel[2]}, type),
                   grad = random({sizes.samples, channels, out[0], out[1], out[2]}, type),
                   bias = has_bias ? at::randn({channels}, at::kDouble).to(type) : at::Tensor();
  const at::Tensor own_out = unwritten(grad.sizes(), type), own_input = unwritten(input.sizes(), type),
                   own_weight = unwritten(weight.sizes(), type),
                   own_bias = has_bias ? at::empty({channels}, type).fill_(NAN) : at::Tensor();
  if (kind == Kind::pointwise) {
    nhwc::cpu::pointwise(input, weight.flatten(1), bias, own_out);
    nhwc::cpu::pointwise(grad, weight.flatten(1).t(), {}, own_input);
    nhwc::cpu::weight_gradient(sizes, grad, input, own_weight, own_bias);
  } else if (is_depthwise) {
    nhwc::cpu::depthwise_forward(sizes, input, weight, bias, own_out);
    nhwc::cpu::depthwise_input_gradient(sizes, grad, weight, own_input);
    nhwc::cpu::depthwise_weight_gradient(sizes, grad, input, own_weight, own_bias);
  } else if (kind == Kind::winograd) {
    nhwc::cpu::WinogradTile tile = {{1, 1, 1}};
    for (int axis = 0; axis < 3; ++axis) {
      if (kernel[axis] == 3) tile.results[axis] = axis == 2 || kernel[2] == 1 ? one_of({2, 4}) : 2;
    }
    nhwc::cpu::winograd_forward(sizes, tile, input, weight, bias, own_out);
    if (own_out.scalar_type() == at::kFloat) {
      const at::Tensor residual = at::randn_like(own_out), finished = at::empty_like(own_out);
      nhwc::cpu::winograd_forward(sizes, tile, input, weight, bias, finished,
                                  {residual, {nhwc::cpu::ActivationKind::relu, 6}});
      TORCH_CHECK(finished.equal((own_out + residual).clamp(0, 6)), "what follows the results differs");
    }
    nhwc::cpu::winograd_input_gradient(sizes, tile, grad, weight, {}, own_input);
    nhwc::cpu::winograd_weight_gradient(sizes, tile, grad, input, own_weight, own_bias);
  } else if (kind == Kind::inner_product) {
    nhwc::cpu::inner_product_forward(sizes, input, weight, bias, own_out);
  } else {
    nhwc::cpu::weight_gradient(sizes, grad, input, own_weight, own_bias);
  }

  const at::Tensor x = reference(input), w = reference(weight), g = reference(grad);
  const std::array<int64_t, 3> none{};
  const at::Tensor expected = at::convolution(x, w, has_bias ? std::optional(reference(bias)) : std::nullopt,
                                              sizes.stride, sizes.padding, sizes.dilation, false, none, sizes.groups);
  const auto [of_input, of_weight, of_bias] =
      at::convolution_backward(g, x, w, at::OptionalIntArrayRef(channels), sizes.stride, sizes.padding, sizes.dilation,
                               false, none, sizes.groups, {true, true, true});
  if (kind != Kind::grouped) expect(own_out, expected, type, "output of " + what);
  if (kind == Kind::inner_product) return;
  if (kind != Kind::grouped) expect(own_input, of_input, type, "input gradient of " + what);
  expect(own_weight, of_weight, type, "weight gradient of " + what);
  if (has_bias) expect(own_bias, of_bias, type, "bias gradient of " + what);
}

/// Expects that the positions that are packed for some results of an axis are those that its taps see, and no more than
/// taps see or than there are from the first to the last of them.
void check_axis() {
  ConvolutionSizes sizes{};
  draw_axis(sizes, 0, 20);
  sizes.dilation[0] = one_of({sizes.dilation[0], 1, 36});
  const auto axis = one_of({0, 1}) == 1 ? nhwc::cpu::forward_axis(sizes, 0)
                                        : nhwc::cpu::gradient_axis(sizes, 0, between(0, sizes.stride[0] - 1));
  if (axis.count < 1) return;
  const int64_t first = between(0, axis.count - 1), count = between(1, axis.count - first);
  const auto packed = nhwc::cpu::packed_axis(axis, count);
  bool is_right =
      packed.positions() <= axis.taps * count &&
      (axis.taps == 0 || packed.positions() <= (count - 1) * axis.stride + (axis.taps - 1) * axis.dilation + 1);
  for (int64_t i = first; i < first + count; ++i) {
    for (int64_t tap = 0; tap < axis.taps; ++tap) {
      const int64_t source = axis.begin + i * axis.stride + tap * axis.dilation;
      const int64_t position = (i - first) * packed.step + tap * packed.tap_step;
      const auto segment = nhwc::cpu::segment_of(packed, first, position / packed.length);
      const int64_t within = position % packed.length - segment.inside.begin;
      const bool is_inside = source >= 0 && source < axis.source;
      is_right &= packed.source_of(first, position) == source;
      is_right &= (within >= 0 && within < segment.inside.size()) == is_inside;
      is_right &= !is_inside || segment.source + within * packed.source_step == source;
    }
  }
  if (is_right) return;
  std::fprintf(stderr, "failed: an axis of %ld, kernel %ld, stride %ld, padding %ld, dilation %ld\n", sizes.input[0],
               sizes.kernel[0], sizes.stride[0], sizes.padding[0], sizes.dilation[0]);
  std::exit(1);
}

void check_norm(at::ScalarType type) {
  GroupNormShape shape{one_of({1, 1, 2, 5}), one_of({1, 2, 3, between(1, 50), between(1, 2000)}), 0, 1};
  const int64_t of_group = one_of({1, 2, 3, between(1, 40)});
  shape.groups = one_of({1, 2, 3, between(1, 40)});
  shape.channels = shape.groups * of_group;
  const bool is_affine = one_of({0, 1}) == 1;
  std::ostringstream text;
  text << type << " norm, " << shape.samples << " x " << shape.rows << " rows, " << shape.groups << " groups of "
       << of_group;
  const std::string what = text.str();

  const at::ScalarType of_statistics = type == at::kDouble ? at::kDouble : at::kFloat;
  const std::array<int64_t, 5> sizes = {shape.samples, shape.channels, 1, 1, shape.rows};
  const at::Tensor input = random(sizes, type), grad = random(sizes, type),
                   weight = is_affine ? at::randn({shape.channels}, of_statistics) : at::Tensor(),
                   bias = is_affine ? at::randn({shape.channels}, of_statistics) : at::Tensor();
  const at::Tensor out = unwritten(sizes, type), own_input = unwritten(sizes, type),
                   mean = at::empty({shape.samples, shape.groups}, of_statistics), rstd = at::empty_like(mean),
                   variance = at::empty_like(mean), own_weight = at::empty({shape.channels}, at::kDouble),
                   own_bias = at::empty_like(own_weight);
  const double eps = 0.1;
  nhwc::cpu::group_norm(shape, input, weight, bias, eps, out, mean, rstd, variance);
  nhwc::cpu::group_norm_backward(shape, grad, input, mean, rstd, weight, own_input, own_weight, own_bias);

  const at::Tensor x = reference(input), g = reference(grad);
  const auto number = [&](const at::Tensor& each) { return is_affine ? std::optional(reference(each)) : std::nullopt; };
  const auto [expected, means, rstds] = at::native_group_norm(x, number(weight), number(bias), shape.samples,
                                                              shape.channels, shape.rows, shape.groups, eps);
  const auto [of_input, of_weight, of_bias] =
      at::native_group_norm_backward(g, x, means, rstds, number(weight), shape.samples, shape.channels, shape.rows,
                                     shape.groups, {true, is_affine, is_affine});
  expect(out, expected, type, "output of " + what);
  expect(mean, means, of_statistics, "mean of " + what);
  expect(rstd, rstds, of_statistics, "reciprocal deviation of " + what);
  expect(variance, rstds.pow(-2) - eps, of_statistics, "variance of " + what);
  expect(own_input, of_input, type, "input gradient of " + what);
  if (is_affine) expect(own_weight, of_weight, of_statistics, "weight gradient of " + what);
  if (is_affine) expect(own_bias, of_bias, of_statistics, "bias gradient of " + what);
}

void check_softmax(at::ScalarType type) {
  const int64_t channels = one_of({1, 2, 3, 8, 16, between(1, nhwc::cpu::most_softmax_channels)});
  const std::array<int64_t, 5> sizes = {one_of({0, 1, 2}), channels, 1, 1, one_of({1, between(1, 2000), 4096})};
  const bool is_log = one_of({0, 1}) == 1;
  std::ostringstream text;
  text << type << (is_log ? " log-softmax" : " softmax") << " of " << at::IntArrayRef(sizes);
  const std::string what = text.str();

  const at::Tensor input = random(sizes, type), grad = random(sizes, type), out = unwritten(sizes, type),
                   own_input = unwritten(sizes, type);
  nhwc::cpu::softmax(input, is_log, out);
  nhwc::cpu::softmax_backward(grad, out, is_log, own_input);

  const at::Tensor x = reference(input), g = reference(grad), y = reference(out);
  expect(out, is_log ? at::log_softmax(x, 1) : at::softmax(x, 1), type, "output of " + what);
  expect(
      own_input,
      is_log ? at::_log_softmax_backward_data(g, y, 1, at::kDouble) : at::_softmax_backward_data(g, y, 1, at::kDouble),
      type, "input gradient of " + what);
}

}  // namespace

int main(int argument_count, char** arguments) {
  const int count = argument_count > 1 ? std::atoi(arguments[1]) : 100;
  at::manual_seed(0);
  for (const at::ScalarType type : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16}) {
    for (int i = 0; i < count; ++i) {
      at::set_num_threads(1 + i % 3);
      check_axis();
      check_convolution(type, i % 2 == 0 ? Kind::depthwise : Kind::grouped);
      if (type != at::kDouble) check_convolution(type, Kind::inner_product);
      if (type != at::kDouble) check_convolution(type, Kind::pointwise);
      if (type != at::kDouble) check_convolution(type, Kind::winograd);
      check_norm(type);
      if (type != at::kDouble) check_softmax(type);
    }
  }
  std::puts("ok");
}
