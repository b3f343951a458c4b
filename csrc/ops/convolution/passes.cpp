#include "ops/convolution/passes.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <numeric>
#include <vector>

#include "layout/channels_last.h"
#include "ops/autograd_node.h"
#include "ops/composition.h"
#include "ops/convolution/float32.h"
#include "ops/convolution/gains.h"
#include "ops/convolution/kernels.h"
#include "ops/convolution/opaque.h"
#include "ops/convolution/ways.h"

namespace nhwc {
namespace {

using Gradients = std::vector<at::Tensor>;  // of the input, the weight and the bias; undefined where not needed

Call without_kernels(const Call& call) {
  Call other = call;
  other.may_use_kernels = false;
  return other;
}

at::Tensor as_computed(const at::Tensor& tensor, bool in_float32) {
  return in_float32 && tensor.defined() ? tensor.to(at::kFloat) : tensor;
}

/// Returns PyTorch's result, in the dtype and the format of the input.
at::Tensor pytorchs(const Call& call, bool in_float32) {
  const auto wide = [&](const at::Tensor& tensor) { return as_computed(tensor, in_float32); };
  const OptionalTensor bias = call.has_bias() ? OptionalTensor(wide(*call.bias)) : OptionalTensor();
  const at::Tensor out = at::convolution_symint(wide(call.input), wide(call.weight), bias, call.stride, call.padding,
                                                call.dilation, call.is_transposed, call.output_padding, call.groups)
                             .to(call.input.scalar_type());
  return call.is_channels_last_input() ? to_channels_last(out) : out;
}

/// Returns PyTorch's gradients, which can be differentiated.
Gradients pytorchs_gradients(const Call& call, const at::Tensor& grad, std::array<bool, 3> needed, bool in_float32) {
  const auto wide = [&](const at::Tensor& tensor) { return as_computed(tensor, in_float32); };
  const std::array<c10::SymInt, 1> channels = {grad.sym_size(1)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      wide(grad), wide(call.input), wide(call.weight), at::OptionalSymIntArrayRef(channels), call.stride, call.padding,
      call.dilation, call.is_transposed, call.output_padding, call.groups, needed);
  const auto cast = [&](const at::Tensor& gradient) {
    return gradient.defined() ? gradient.to(call.input.scalar_type()) : gradient;
  };
  of_input = cast(of_input);
  if (of_input.defined() && is_channels_last(call.input)) of_input = to_channels_last(of_input);
  return {of_input, cast(of_weight), cast(of_bias)};
}

/// Returns the gradients, each by who computes it.
Gradients computed_gradients(const Call& call, const at::Tensor& grad, std::array<bool, 3> needed, const Passes& ours,
                             bool in_float32) {
  const bool ours_of_input = needed[0] && ours.input_gradient,
             ours_of_weight = (needed[1] || needed[2]) && ours.weight_gradient;
  Gradients gradients(3);
  const std::array<bool, 3> others = {needed[0] && !ours_of_input, needed[1] && !ours_of_weight,
                                      needed[2] && !ours_of_weight};
  if (others[0] || others[1] || others[2]) gradients = pytorchs_gradients(call, grad, others, in_float32);
  if (!ours_of_input && !ours_of_weight) return gradients;
  const auto compute = call.is_compiled ? opaque::gradients : kernels::gradients;
  const auto own = compute(call, grad, {ours_of_input, needed[1] && ours_of_weight, needed[2] && ours_of_weight});
  for (size_t index = 0; index < own.size(); ++index) {
    if (own[index].defined()) gradients[index] = own[index];
  }
  return gradients;
}

at::SymDimVector as_sizes(const c10::IValue& numbers) {
  at::SymDimVector sizes;
  for (const int64_t number : numbers.toIntVector()) sizes.emplace_back(number);
  return sizes;
}

std::vector<int64_t> as_numbers(const at::SymDimVector& sizes) {
  std::vector<int64_t> numbers;
  for (const c10::SymInt& size : sizes) numbers.push_back(size.expect_int());
  return numbers;
}

const Formula by_their_passes = {
    "NhwcConvolutionBackward", [](const Gradients& gradients, const Formula::Context& context) -> Gradients {
      const at::Tensor& grad = gradients[0];
      if (!grad.defined()) return Gradients(3);
      const std::vector<c10::IValue>& constants = context.constants;
      Call call = {context.saved[0],       context.saved[1],       {},
                   as_sizes(constants[0]), as_sizes(constants[1]), as_sizes(constants[2]),
                   constants[3].toInt(),   as_sizes(constants[4]), constants[5].toBool()};
      call.is_compiled = constants[9].toBool();
      const std::array<bool, 3> needed = {context.needed[0], context.needed[1], context.needed[2]};
      const std::array<at::Tensor, 3> all = {grad, call.input, call.weight};
      const bool is_composed = at::GradMode::is_enabled() || !are_plain(all, call.is_compiled);
      if (is_composed) return composed_gradients(call, grad, needed);
      const Passes ours = {true, constants[6].toBool(), constants[7].toBool()};
      return computed_gradients(call, grad, needed, ours, /*in_float32=*/constants[8].toBool());
    }};

std::array<at::Tensor, 3> inputs_of(const Call& call) {
  return {call.input, call.weight, call.bias.value_or(at::Tensor())};
}

/// Returns the result, with a derivative whose passes are computed by our kernels where `ours` says so.
at::Tensor computed(const Call& call, const Passes& ours, bool in_float32) {
  const std::array<at::Tensor, 3> inputs = inputs_of(call);
  at::Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto by_kernels = call.is_compiled ? opaque::forward : kernels::forward;
    out = ours.forward ? by_kernels(call) : pytorchs(call, in_float32);
  }
  if (!needs_gradient(inputs)) return out;
  record(by_their_passes, out, inputs, {call.input, call.weight},
         {as_numbers(call.stride), as_numbers(call.padding), as_numbers(call.dilation), call.groups.expect_int(),
          as_numbers(call.output_padding), call.is_transposed, ours.input_gradient, ours.weight_gradient, in_float32,
          call.is_compiled});
  return out;
}

}  // namespace

Gradients composed_gradients(const Call& with_kernels, const at::Tensor& grad, std::array<bool, 3> needed) {
  const Call call = without_kernels(with_kernels);
  const bool is_differentiated = at::GradMode::is_enabled();
  const at::AutoGradMode as_in_forward(true);
  if (is_pytorchs(way_of(call))) {
    const bool in_float32 = needs_float32(call);
    const at::AutoGradMode as_before(is_differentiated);
    return pytorchs_gradients(call, grad, needed, in_float32);
  }
  std::vector<at::Tensor> inputs;
  if (needed[0]) inputs.push_back(call.input);
  if (needed[1]) inputs.push_back(call.weight);
  Gradients gradients(3);
  if (!inputs.empty()) {
    const std::vector<at::Tensor> found =
        torch::autograd::grad({convolution(call)}, inputs, {grad}, /*retain_graph=*/is_differentiated,
                              /*create_graph=*/is_differentiated);
    if (needed[0]) gradients[0] = found.front();
    if (needed[1]) gradients[1] = found.back();
  }
  if (needed[2]) {
    std::vector<int64_t> others(grad.dim());
    std::iota(others.begin(), others.end(), 0);
    others.erase(others.begin() + 1);
    gradients[2] = grad.sum(others);
  }
  return gradients;
}

bool is_by_kernels(const Call& call) {
  const Passes ours = passes_of_kernels(call);
  return ours.forward && (ours.input_gradient || !has_gradient_to_come(call.input)) &&
         (ours.weight_gradient || !has_gradient_to_come(call.weight));
}

bool is_by_kernels_in_part(const Call& call) {
  const Passes ours = passes_of_kernels(call);
  return ours.forward || (ours.input_gradient && has_gradient_to_come(call.input)) ||
         (ours.weight_gradient && has_gradient_to_come(call.weight));
}

at::Tensor by_passes(const Call& call) {
  if (!are_plain(inputs_of(call), call.is_compiled) ||
      c10::impl::TorchDispatchModeTLS::any_modes_set(/*skip_infra_modes=*/call.is_compiled)) {
    const Call other = without_kernels(call);
    const Way& way = way_of(other);
    return way.compute == by_passes ? pytorchs(other, needs_float32(other)) : way.compute(other);
  }
  // Decided once: the rules ask which gradients may come, which the backward no longer knows.
  return computed(call, passes_of_kernels(call), needs_float32(call));
}

at::Tensor by_all_kernels(const Call& call) {
  if (has_tangent(inputs_of(call))) return convolution(without_kernels(call));
  return computed(call, {true, true, true}, /*in_float32=*/false);
}

}  // namespace nhwc
