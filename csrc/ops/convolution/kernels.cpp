#include "ops/convolution/kernels.h"

#include <ATen/ATen.h>

#include <vector>

#include "cpu/convolution_sizes.h"
#include "cpu/depthwise.h"
#include "cpu/grouped.h"
#include "cpu/pointwise.h"
#include "cpu/weight_gradient.h"
#include "layout/channels_last.h"

namespace nhwc::kernels {
namespace {

/// Returns the sizes of the convolution from the larger activation to the smaller one: of a transposed one, from its
/// output to its input.
cpu::ConvolutionSizes sizes_of(const Call& call) {
  const auto number = [](const c10::SymInt& size) { return size.expect_int(); };
  const int64_t groups = number(call.groups);
  cpu::ConvolutionSizes sizes = {call.input.size(0), groups,    call.weight.size(1), call.weight.size(0) / groups,
                                 {1, 1, 1},          {1, 1, 1}, {1, 1, 1},           {1, 1, 1},
                                 {0, 0, 0},          {1, 1, 1}};
  for (int64_t from_last = 1; from_last <= static_cast<int64_t>(call.axes()); ++from_last) {
    const int64_t at = 3 - from_last;
    const Axis axis = call.axis(from_last);
    sizes.input[at] = number(axis.size);
    sizes.output[at] = number(axis.positions);
    sizes.kernel[at] = call.weight.size(-from_last);
    sizes.stride[at] = number(axis.stride);
    sizes.padding[at] = number(axis.padding);
    sizes.dilation[at] = number(call.dilation[call.axes() - from_last]);
  }
  return sizes;
}

/// Returns an uninitialised activation of these channels, and of the larger sizes or of the smaller ones.
at::Tensor empty_activation(const Call& call, bool is_larger, int64_t channels) {
  std::vector<int64_t> sizes = {call.input.size(0), channels};
  for (auto from_last = static_cast<int64_t>(call.axes()); from_last > 0; --from_last) {
    const Axis axis = call.axis(from_last);
    sizes.push_back((is_larger ? axis.size : axis.positions).expect_int());
  }
  const auto format = call.axes() == 3 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
  return at::empty(sizes, call.input.options().memory_format(format));
}

/// Returns the smaller activation of a larger one.
at::Tensor smaller(const Call& call, const at::Tensor& larger, const OptionalTensor& bias) {
  const at::Tensor out = empty_activation(call, /*is_larger=*/false, call.weight.size(0));
  if (cpu::is_pointwise(sizes_of(call))) {
    cpu::pointwise(larger, call.weight.detach().flatten(1), bias.value_or(at::Tensor()), out);
    return out;
  }
  const at::Tensor weight = to_channels_last(call.weight.detach()), none;
  const auto compute = call.is_depthwise() ? cpu::depthwise_forward : cpu::grouped_forward;
  compute(sizes_of(call), larger, weight, bias ? bias->contiguous() : none, out);
  return out;
}

/// Returns the larger activation, or the gradient of it, of a smaller one.
at::Tensor larger(const Call& call, const at::Tensor& smaller) {
  const at::Tensor out = empty_activation(call, /*is_larger=*/true, call.weight.size(1) * call.groups.expect_int());
  if (cpu::is_pointwise(sizes_of(call))) {
    cpu::pointwise(smaller, call.weight.detach().flatten(1).t(), {}, out);
    return out;
  }
  const at::Tensor weight = to_channels_last(call.weight.detach());
  const auto compute = call.is_depthwise() ? cpu::depthwise_input_gradient : cpu::grouped_input_gradient;
  compute(sizes_of(call), smaller, weight, out);
  return out;
}

}  // namespace

at::Tensor forward(const Call& call) {
  const at::Tensor input = to_channels_last(call.input);
  if (!call.is_transposed) return smaller(call, input, call.bias);
  const at::Tensor out = larger(call, input);
  if (call.has_bias()) channels_to_end(out).add_(*call.bias);
  return out;
}

at::Tensor input_gradient(const Call& call, const at::Tensor& grad) {
  return call.is_transposed ? smaller(call, grad, {}) : larger(call, grad);
}

std::pair<at::Tensor, at::Tensor> weight_gradient(const Call& call, const at::Tensor& grad, bool of_bias) {
  const at::Tensor input = to_channels_last(call.input);
  const at::Tensor& smaller = call.is_transposed ? input : grad;
  const at::Tensor& larger = call.is_transposed ? grad : input;
  at::Tensor of_weight = empty_channels_last(call.weight), bias_of_smaller, bias;
  if (of_bias && !call.is_transposed) bias = bias_of_smaller = at::empty({grad.size(1)}, grad.options());
  const auto compute = cpu::is_pointwise(sizes_of(call)) ? cpu::pointwise_weight_gradient
                       : call.is_depthwise()             ? cpu::depthwise_weight_gradient
                                                         : cpu::weight_gradient;
  compute(sizes_of(call), smaller, larger, of_weight, bias_of_smaller);
  if (of_bias && call.is_transposed) bias = channels_to_end(grad).flatten(0, -2).sum(0);
  if (!is_channels_last(call.weight)) of_weight = of_weight.clone(at::MemoryFormat::Contiguous);
  return {of_weight, bias};
}

}  // namespace nhwc::kernels
