#include "ops/convolution/opaque.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <tuple>

#include "ops/autograd_node.h"
#include "ops/convolution/kernels.h"
#include "ops/convolution/passes.h"
#include "torch_nhwc/ops.h"

namespace nhwc {
namespace {

using SymInts = at::SymIntArrayRef;
using Mask = std::array<bool, 3>;
using ThreeGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Call call_of(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, SymInts stride,
             SymInts padding, SymInts dilation, bool is_transposed, SymInts output_padding, const c10::SymInt& groups) {
  const auto own = [](SymInts sizes) { return at::SymDimVector(sizes.begin(), sizes.end()); };
  Call call = {input,        weight, bias, own(stride), own(padding), own(dilation), groups, own(output_padding),
               is_transposed};
  call.is_compiled = true;
  return call;
}

/// Refuses what the kernels do not compute.
void check(const char* name, const Call& call, const at::Tensor& grad, bool is_of_weight) {
  const at::ScalarType type = call.input.scalar_type();
  const auto fits = [&](const at::Tensor& each) {
    return !each.defined() || (each.scalar_type() == type && each.device() == call.input.device());
  };
  TORCH_CHECK(at::isFloatingType(type) && fits(call.weight) && fits(call.bias.value_or(at::Tensor())) && fits(grad),
              name, ": the tensors must have one floating-point dtype and be on one device");
  TORCH_CHECK((call.axes() == 2 || call.axes() == 3) && static_cast<size_t>(call.input.dim()) == call.axes() + 2 &&
                  call.is_accepted(),
              name, ": the sizes of input ", call.input.sym_sizes(), " and weight ", call.weight.sym_sizes(),
              " do not fit");
  TORCH_CHECK(is_of_weight || kernels::serve_all_passes(call), name, ": the weight ", call.weight.sym_sizes(),
              " must be depthwise, or have one tap and at most 4 inputs or outputs");
  TORCH_CHECK(!grad.defined() || grad.sym_sizes() == at::SymIntArrayRef(kernels::output_sizes(call)), name,
              ": the gradient has sizes ", grad.sym_sizes(), ", the output ",
              at::SymIntArrayRef(kernels::output_sizes(call)));
}

at::Tensor forward(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, SymInts stride,
                   SymInts padding, SymInts dilation, bool transposed, SymInts output_padding, c10::SymInt groups) {
  const Call call = call_of(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  check("nhwc::convolution_by_kernels", call, {}, /*is_of_weight=*/false);
  return kernels::forward(call);
}

ThreeGradients backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, SymInts stride,
                        SymInts padding, SymInts dilation, bool transposed, SymInts output_padding, c10::SymInt groups,
                        Mask output_mask) {
  const Call call = call_of(input, weight, {}, stride, padding, dilation, transposed, output_padding, groups);
  check("nhwc::convolution_by_kernels_backward", call, grad, /*is_of_weight=*/!output_mask[0]);
  auto [of_input, of_weight, of_bias] = kernels::gradients(call, grad, output_mask);
  return {of_input, of_weight, of_bias};
}

const auto& forward_operator() {
  static const auto op = ops_detail::find<decltype(forward)>("nhwc::convolution_by_kernels");
  return op;
}

const auto& backward_operator() {
  static const auto op = ops_detail::find<decltype(backward)>("nhwc::convolution_by_kernels_backward");
  return op;
}

at::Tensor forward_autograd(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                            SymInts stride, SymInts padding, SymInts dilation, bool transposed, SymInts output_padding,
                            c10::SymInt groups) {
  return by_all_kernels(call_of(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups));
}

ThreeGradients backward_autograd(c10::DispatchKeySet keys, const at::Tensor& grad, const at::Tensor& input,
                                 const at::Tensor& weight, SymInts stride, SymInts padding, SymInts dilation,
                                 bool transposed, SymInts output_padding, c10::SymInt groups, Mask output_mask) {
  const std::array<at::Tensor, 3> inputs = {grad, input, weight};
  if (needs_gradient(inputs) || has_tangent(inputs)) {
    const auto found = composed_gradients(
        call_of(input, weight, {}, stride, padding, dilation, transposed, output_padding, groups), grad, output_mask);
    return {found[0], found[1], found[2]};
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return backward_operator().redispatch(keys & c10::after_autograd_keyset, grad, input, weight, stride, padding,
                                        dilation, transposed, output_padding, groups, output_mask);
}

void implement(torch::Library& m) {
  m.impl("convolution_by_kernels", TORCH_FN(forward));
  m.impl("convolution_by_kernels_backward", TORCH_FN(backward));
}

}  // namespace

at::Tensor opaque::forward(const Call& call) {
  return forward_operator().call(call.input, call.weight, call.bias, call.stride, call.padding, call.dilation,
                                 call.is_transposed, call.output_padding, call.groups);
}

std::array<at::Tensor, 3> opaque::gradients(const Call& call, const at::Tensor& grad, Mask needed) {
  auto [of_input, of_weight, of_bias] =
      backward_operator().call(grad, call.input, call.weight, call.stride, call.padding, call.dilation,
                               call.is_transposed, call.output_padding, call.groups, needed);
  return {of_input, of_weight, of_bias};
}

TORCH_LIBRARY_IMPL(nhwc, CPU, m) { implement(m); }
TORCH_LIBRARY_IMPL(nhwc, Meta, m) { implement(m); }
TORCH_LIBRARY_IMPL(nhwc, Autograd, m) {
  m.impl("convolution_by_kernels", TORCH_FN(forward_autograd));
  m.impl("convolution_by_kernels_backward", TORCH_FN(backward_autograd));
}

}  // namespace nhwc
