#include "ops/convolution/kernels.h"

#include <ATen/ATen.h>

#include <tuple>
#include <utility>

#include "cpu/depthwise.h"
#include "cpu/pointwise.h"
#include "cpu/pointwise_kernels.h"
#include "cpu/weight_gradient.h"
#include "cpu/work/axes.h"
#include "layout/channels_last.h"
#include "ops/composition.h"

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

/// Returns the sizes of an activation of these channels, and of the larger sizes or of the smaller ones.
at::SymDimVector sizes_of_activation(const Call& call, bool is_larger, const c10::SymInt& channels) {
  at::SymDimVector sizes = {call.input.sym_size(0), channels};
  for (auto from_last = static_cast<int64_t>(call.axes()); from_last > 0; --from_last) {
    const Axis axis = call.axis(from_last);
    sizes.push_back(is_larger ? axis.size : axis.positions);
  }
  return sizes;
}

/// Returns an uninitialised activation.
at::Tensor empty_activation(const Call& call, bool is_larger, const c10::SymInt& channels) {
  const auto format = call.axes() == 3 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
  return at::empty_symint(sizes_of_activation(call, is_larger, channels), call.input.options().memory_format(format));
}

/// Returns the smaller activation of a larger one.
at::Tensor smaller(const Call& call, const at::Tensor& larger, const OptionalTensor& bias) {
  const at::Tensor out = empty_activation(call, /*is_larger=*/false, call.weight.sym_size(0));
  if (out.is_meta()) return out;
  if (is_pointwise(call)) {
    cpu::pointwise(larger, call.weight.detach().flatten(1), bias.value_or(at::Tensor()), out);
    return out;
  }
  const at::Tensor weight = to_channels_last(call.weight.detach()), none;
  cpu::depthwise_forward(sizes_of(call), larger, weight, bias ? bias->contiguous() : none, out);
  return out;
}

/// Returns the larger activation, or the gradient of it, of a smaller one.
at::Tensor larger(const Call& call, const at::Tensor& smaller, const OptionalTensor& bias) {
  const at::Tensor out = empty_activation(call, /*is_larger=*/true, call.weight.sym_size(1) * call.groups);
  if (out.is_meta()) return out;
  if (is_pointwise(call)) {
    cpu::pointwise(smaller, call.weight.detach().flatten(1).t(), bias.value_or(at::Tensor()), out);
    return out;
  }
  const at::Tensor weight = to_channels_last(call.weight.detach());
  cpu::depthwise_input_gradient(sizes_of(call), smaller, weight, out);
  if (bias && bias->defined()) channels_to_end(out).add_(*bias);
  return out;
}

/// Returns the gradients of the weight and of the bias, which is undefined if it is not needed.
std::pair<at::Tensor, at::Tensor> weight_gradient(const Call& call, const at::Tensor& grad, bool of_bias) {
  const at::Tensor input = to_channels_last(call.input);
  const at::Tensor& smaller = call.is_transposed ? input : grad;
  const at::Tensor& larger = call.is_transposed ? grad : input;
  at::Tensor of_weight = empty_channels_last(call.weight), bias_of_smaller, bias;
  if (of_bias && !call.is_transposed) bias = bias_of_smaller = at::empty_symint({grad.sym_size(1)}, grad.options());
  if (!of_weight.is_meta()) {
    const auto compute = is_pointwise(call)    ? cpu::pointwise_weight_gradient
                         : call.is_depthwise() ? cpu::depthwise_weight_gradient
                                               : cpu::weight_gradient;
    compute(sizes_of(call), smaller, larger, of_weight, bias_of_smaller);
  }
  if (of_bias && call.is_transposed) bias = channels_to_end(grad).flatten(0, -2).sum(0);
  if (!is_channels_last(call.weight)) of_weight = of_weight.clone(at::MemoryFormat::Contiguous);
  return {of_weight, bias};
}

}  // namespace

bool is_pointwise(const Call& call) {
  if (call.groups != 1 || call.input.scalar_type() == at::kDouble) return false;
  for (size_t index = 0; index < call.axes(); ++index) {
    if (call.weight.sym_size(static_cast<int64_t>(index) + 2) != 1 || call.stride[index] != 1) return false;
    if (call.padding[index] != 0 || call.output_padding[index] != 0) return false;
  }
  const c10::SymInt &outputs = call.weight.sym_size(0), &inputs = call.weight.sym_size(1);
  return outputs.min(inputs) <= cpu::most_few && outputs.max(inputs) <= cpu::most_pointwise_channels;
}

bool serve_all_passes(const Call& call) { return call.is_depthwise() || is_pointwise(call); }

at::SymDimVector output_sizes(const Call& call) {
  return call.is_transposed ? sizes_of_activation(call, /*is_larger=*/true, call.weight.sym_size(1) * call.groups)
                            : sizes_of_activation(call, /*is_larger=*/false, call.weight.sym_size(0));
}

at::Tensor forward(const Call& call) {
  const at::Tensor input = to_channels_last(call.input);
  return call.is_transposed ? larger(call, input, call.bias) : smaller(call, input, call.bias);
}

std::array<at::Tensor, 3> gradients(const Call& call, const at::Tensor& grad, std::array<bool, 3> needed) {
  const at::Tensor dense = to_channels_last(grad);
  at::Tensor of_input, of_weight, of_bias;
  if (needed[0]) of_input = call.is_transposed ? smaller(call, dense, {}) : larger(call, dense, {});
  if (needed[1] || needed[2]) std::tie(of_weight, of_bias) = weight_gradient(call, dense, needed[2]);
  return {of_input, needed[1] ? of_weight : at::Tensor(), of_bias};
}

}  // namespace nhwc::kernels
