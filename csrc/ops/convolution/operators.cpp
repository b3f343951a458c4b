// The operators of convolutions, whose numbers are right where PyTorch's are not on a CPU, and which are fast where
// PyTorch's are slow on channels-last.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "ops/autocast.h"
#include "ops/autograd_node.h"
#include "ops/convolution/passes.h"
#include "torch_nhwc/ops.h"

namespace nhwc {
namespace {

template <size_t axes>
Call by_numbers(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef dilation,
                const c10::SymInt& groups) {
  return {input,
          weight,
          bias,
          for_each_axis(stride, axes),
          for_each_axis(padding, axes),
          for_each_axis(dilation, axes),
          groups,
          at::SymDimVector(axes, 0)};
}

template <size_t axes>
Call transposed(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef output_padding,
                const c10::SymInt& groups, at::SymIntArrayRef dilation) {
  Call call = by_numbers<axes>(input, weight, bias, stride, padding, dilation, groups);
  call.is_transposed = true;
  call.output_padding = for_each_axis(output_padding, axes);
  return call;
}

template <size_t axes>
at::Tensor convolve(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                    at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef dilation,
                    c10::SymInt groups) {
  return convolution(by_numbers<axes>(input, weight, bias, stride, padding, dilation, groups));
}

/// Returns the call that a padding by name means; nothing where PyTorch refuses it. Where "same" is one more at the end
/// than at the beginning, the input is padded by that one, as PyTorch does.
template <size_t axes>
std::optional<Call> by_name(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                            at::SymIntArrayRef stride, c10::string_view padding, at::SymIntArrayRef dilation,
                            const c10::SymInt& groups) {
  Call call = by_numbers<axes>(input, weight, bias, stride, at::SymDimVector(axes, 0), dilation, groups);
  if (padding == "valid") return call;
  const bool is_strided =
      std::any_of(call.stride.begin(), call.stride.end(), [](const c10::SymInt& each) { return each != 1; });
  if (padding != "same" || is_strided || weight.dim() != axes + 2 || call.dilation.size() != axes) return {};
  at::SymDimVector uneven;
  for (size_t index = axes; index-- > 0;) {
    const c10::SymInt both = call.dilation[index] * (weight.sym_size(index + 2) - 1);
    call.padding[index] = both / 2;
    uneven.append({0, both % 2});
  }
  const bool is_even = std::all_of(uneven.begin(), uneven.end(), [](const c10::SymInt& each) { return each == 0; });
  if (!is_even) call.input = at::constant_pad_nd_symint(input, uneven, 0);
  return call;
}

template <size_t axes, bool is_compiled = false>
at::Tensor convolve_by_name(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                            at::SymIntArrayRef stride, c10::string_view padding, at::SymIntArrayRef dilation,
                            c10::SymInt groups) {
  auto call = by_name<axes>(input, weight, bias, stride, padding, dilation, groups);
  if (call) call->is_compiled = is_compiled;
  if (call && call->is_accepted()) return convolution(*call);
  return axes == 3 ? at::conv3d_symint(input, weight, bias, stride, padding, dilation, groups)
                   : at::conv2d_symint(input, weight, bias, stride, padding, dilation, groups);
}

template <size_t axes>
at::Tensor convolve_transposed(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                               at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef output_padding,
                               c10::SymInt groups, at::SymIntArrayRef dilation) {
  return convolution(transposed<axes>(input, weight, bias, stride, padding, output_padding, groups, dilation));
}

/// Returns a convolution of any kind; an output padding makes it a transposed one.
Call of_any_kind(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                 at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef dilation,
                 const c10::SymInt& groups, at::OptionalSymIntArrayRef output_padding) {
  const bool is_3d = weight.dim() == 5;
  if (output_padding) {
    const auto make = is_3d ? transposed<3> : transposed<2>;
    return make(input, weight, bias, stride, padding, *output_padding, groups, dilation);
  }
  const auto make = is_3d ? by_numbers<3> : by_numbers<2>;
  return make(input, weight, bias, stride, padding, dilation, groups);
}

/// Returns the name of the way that a convolution takes, what it is for, and whether compiled graphs go it, too.
using Answer = std::tuple<std::string, std::string, bool>;

Answer answer(const Call& call) {
  const Way& way = *choose(call).way;
  return {way.name, name_of(way.kind), way.in_graphs};
}

Answer convolution_way(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                       at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef dilation,
                       c10::SymInt groups, at::OptionalSymIntArrayRef output_padding) {
  return answer(of_any_kind(input, weight, bias, stride, padding, dilation, groups, output_padding));
}

/// Computes a convolution in a compiled graph, which sees PyTorch's operators and those of our kernels.
at::Tensor compiled(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                    at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef dilation,
                    c10::SymInt groups, at::OptionalSymIntArrayRef output_padding) {
  Call call = of_any_kind(input, weight, bias, stride, padding, dilation, groups, output_padding);
  call.is_compiled = true;
  return convolution(call);
}

Answer convolution_way_by_name(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                               at::SymIntArrayRef stride, c10::string_view padding, at::SymIntArrayRef dilation,
                               c10::SymInt groups) {
  const auto make = weight.dim() == 5 ? by_name<3> : by_name<2>;
  const auto call = make(input, weight, bias, stride, padding, dilation, groups);
  return call ? answer(*call) : Answer{"unfit", name_of(Kind::pytorchs), true};
}

at::Tensor compiled_by_name(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                            at::SymIntArrayRef stride, c10::string_view padding, at::SymIntArrayRef dilation,
                            c10::SymInt groups) {
  const auto convolve = weight.dim() == 5 ? convolve_by_name<3, true> : convolve_by_name<2, true>;
  return convolve(input, weight, bias, stride, padding, dilation, std::move(groups));
}

// The passes of our kernels as operators, which compilers leave as they are.

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
void check_for_kernels(const char* name, const Call& call, const at::Tensor& grad, Pass pass) {
  const at::ScalarType type = call.input.scalar_type();
  const bool is_number = type == at::kFloat || type == at::kDouble || call.is_half();
  const auto fits = [&](const at::Tensor& each) {
    return !each.defined() || (each.scalar_type() == type && each.device() == call.input.device());
  };
  TORCH_CHECK(
      is_number && fits(call.input) && fits(call.weight) && fits(call.bias.value_or(at::Tensor())) && fits(grad), name,
      ": the tensors must be on one device, and all of float, double, half or bfloat16");
  TORCH_CHECK((call.axes() == 2 || call.axes() == 3) && static_cast<size_t>(call.input.dim()) == call.axes() + 2 &&
                  call.is_accepted(),
              name, ": the sizes of input ", call.input.sym_sizes(), " and weight ", call.weight.sym_sizes(),
              " do not fit, or stride, padding, dilation or output padding have not a number for each axis");
  TORCH_CHECK(is_computable(call, pass), name, ": the weight ", call.weight.sym_sizes(), " of ", type,
              " must be depthwise or, but for double, of one group. With groups, for a gradient of the input, or in a "
              "transposed "
              "convolution, it must have three taps along an axis and one or three along the others, with stride and "
              "dilation 1 "
              "and at most 2 of padding, or, in one group, one tap and at most 4 inputs or outputs");
  TORCH_CHECK(!grad.defined() || grad.sym_sizes() == at::SymIntArrayRef(kernels::output_sizes(call)), name,
              ": the gradient has sizes ", grad.sym_sizes(), ", the output ",
              at::SymIntArrayRef(kernels::output_sizes(call)));
}

at::Tensor by_kernels(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, SymInts stride,
                      SymInts padding, SymInts dilation, bool transposed, SymInts output_padding, c10::SymInt groups) {
  const Call call = call_of(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  check_for_kernels("nhwc::convolution_by_kernels", call, {}, Pass::forward);
  return kernels::forward(call);
}

ThreeGradients by_kernels_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                                   SymInts stride, SymInts padding, SymInts dilation, bool transposed,
                                   SymInts output_padding, c10::SymInt groups, Mask output_mask) {
  const Call call = call_of(input, weight, {}, stride, padding, dilation, transposed, output_padding, groups);
  check_for_kernels("nhwc::convolution_by_kernels_backward", call, grad,
                    output_mask[0] ? Pass::input_gradient : Pass::weight_gradient);
  auto [of_input, of_weight, of_bias] = kernels::gradients(call, grad, output_mask);
  return {of_input, of_weight, of_bias};
}

const auto& backward_operator() {
  static const auto op = ops_detail::find<decltype(by_kernels_backward)>("nhwc::convolution_by_kernels_backward");
  return op;
}

at::Tensor by_kernels_autograd(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                               SymInts stride, SymInts padding, SymInts dilation, bool transposed,
                               SymInts output_padding, c10::SymInt groups) {
  const Call call = call_of(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  check_for_kernels("nhwc::convolution_by_kernels", call, {}, Pass::forward);
  return by_all_kernels(call);
}

ThreeGradients by_kernels_backward_autograd(c10::DispatchKeySet keys, const at::Tensor& grad, const at::Tensor& input,
                                            const at::Tensor& weight, SymInts stride, SymInts padding, SymInts dilation,
                                            bool transposed, SymInts output_padding, c10::SymInt groups,
                                            Mask output_mask) {
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

void implement_kernels(torch::Library& m) {
  m.impl("convolution_by_kernels", TORCH_FN(by_kernels));
  m.impl("convolution_by_kernels_backward", TORCH_FN(by_kernels_backward));
}

template <auto operation>
struct AsGiven {
  static constexpr auto call = operation;
};

template <template <auto> typename As>
void register_all(torch::Library& m) {
  m.impl("conv2d", TORCH_FN(As<convolve<2>>::call));
  m.impl("conv2d.padding", TORCH_FN(As<convolve_by_name<2>>::call));
  m.impl("conv3d", TORCH_FN(As<convolve<3>>::call));
  m.impl("conv3d.padding", TORCH_FN(As<convolve_by_name<3>>::call));
  m.impl("conv_transpose2d", TORCH_FN(As<convolve_transposed<2>>::call));
  m.impl("conv_transpose3d", TORCH_FN(As<convolve_transposed<3>>::call));
  m.impl("compiled_convolution", TORCH_FN(As<compiled>::call));
  m.impl("compiled_convolution.padding", TORCH_FN(As<compiled_by_name>::call));
  m.impl("convolution_way", TORCH_FN(As<convolution_way>::call));
  m.impl("convolution_way.padding", TORCH_FN(As<convolution_way_by_name>::call));
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { register_all<AsGiven>(m); }
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) { register_all<AsGiven>(m); }
TORCH_LIBRARY_IMPL(nhwc, AutocastCPU, m) { register_all<Lowered>(m); }
TORCH_LIBRARY_IMPL(nhwc, AutocastCUDA, m) { register_all<Lowered>(m); }
TORCH_LIBRARY_IMPL(nhwc, CPU, m) { implement_kernels(m); }
TORCH_LIBRARY_IMPL(nhwc, Meta, m) { implement_kernels(m); }
TORCH_LIBRARY_IMPL(nhwc, Autograd, m) {
  m.impl("convolution_by_kernels", TORCH_FN(by_kernels_autograd));
  m.impl("convolution_by_kernels_backward", TORCH_FN(by_kernels_backward_autograd));
}

}  // namespace nhwc
