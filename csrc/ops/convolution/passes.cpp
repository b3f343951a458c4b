#include "ops/convolution/passes.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "cpu/depthwise.h"
#include "cpu/inner_product.h"
#include "cpu/pages.h"
#include "cpu/pointwise.h"
#include "cpu/weight_gradient.h"
#include "cpu/winograd.h"
#include "cpu/work/axes.h"
#include "cuda/depthwise.h"
#include "layout/channels_last.h"
#include "ops/autograd_node.h"
#include "ops/composition.h"
#include "torch_nhwc/ops.h"

namespace nhwc {

// Our kernels.

namespace kernels {
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

at::SymDimVector larger_sizes(const Call& call) {
  return sizes_of_activation(call, /*is_larger=*/true, call.weight.sym_size(1) * call.groups);
}

at::SymDimVector smaller_sizes(const Call& call) {
  return sizes_of_activation(call, /*is_larger=*/false, call.weight.sym_size(0));
}

at::Tensor empty_activation(const Call& call, const at::SymDimVector& sizes) {
  const auto format = call.axes() == 3 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
  return at::empty_symint(sizes, call.input.options().memory_format(format));
}

/// Returns what computes the smaller activation, and the larger one.
Pass pass_to_smaller(const Call& call) { return call.is_transposed ? Pass::input_gradient : Pass::forward; }
Pass pass_to_larger(const Call& call) { return call.is_transposed ? Pass::forward : Pass::input_gradient; }

/// Returns the smaller activation of a larger one: a result, or the gradient of a transposed convolution's input.
at::Tensor from_larger(const Call& call, const at::Tensor& larger, const OptionalTensor& bias,
                       const cpu::Output& output = {}) {
  const at::Tensor out = empty_activation(call, smaller_sizes(call)), none;
  if (out.is_meta()) return out;
  if (out.is_cuda()) {
    cuda::depthwise_forward(depthwise_on_cuda(call), larger, bias && bias->defined() ? bias->contiguous() : none, out);
  } else if (is_pointwise(call)) {
    cpu::pointwise(larger, call.weight.detach().flatten(1), bias.value_or(none), out, output);
  } else if (call.is_depthwise()) {
    cpu::depthwise_forward(sizes_of(call), larger, to_channels_last(call.weight.detach()),
                           bias ? bias->contiguous() : none, out, output);
  } else if (const auto tile = call.groups > 1 ? winograd_tile(call, pass_to_smaller(call))
                                               : faster_winograd_tile(call, pass_to_smaller(call))) {
    cpu::winograd_forward(sizes_of(call), *tile, larger, to_channels_last(call.weight.detach()), bias.value_or(none),
                          out, output);
  } else {
    cpu::inner_product_forward(sizes_of(call), larger, to_channels_last(call.weight.detach()), bias.value_or(none),
                               out);
    output.finish(out);
  }
  return out;
}

/// Returns the larger activation of a smaller one: the gradient of an input, or a transposed convolution's result.
at::Tensor from_smaller(const Call& call, const at::Tensor& smaller, const OptionalTensor& bias) {
  const at::Tensor out = empty_activation(call, larger_sizes(call));
  if (out.is_meta()) return out;
  if (out.is_cuda()) {
    cuda::depthwise_input_gradient(depthwise_on_cuda(call), smaller, out);
    return out;
  }
  if (is_pointwise(call)) {
    cpu::pointwise(smaller, call.weight.detach().flatten(1).t(), bias.value_or(at::Tensor()), out);
    return out;
  }
  if (!call.is_depthwise()) {
    cpu::winograd_input_gradient(sizes_of(call), *winograd_tile(call, pass_to_larger(call)), smaller,
                                 to_channels_last(call.weight.detach()), bias.value_or(at::Tensor()), out);
    return out;
  }
  cpu::depthwise_input_gradient(sizes_of(call), smaller, to_channels_last(call.weight.detach()), out);
  if (bias && bias->defined()) channels_to_end(out).add_(*bias);
  return out;
}

/// Returns the gradients of the weight and of the bias, which is undefined if it is not needed.
std::pair<at::Tensor, at::Tensor> weight_gradient(const Call& call, const at::Tensor& grad, bool of_bias) {
  const at::Tensor input = to_channels_last(call.input);
  const at::Tensor& smaller = call.is_transposed ? input : grad;
  const at::Tensor& larger = call.is_transposed ? grad : input;
  at::Tensor of_weight = empty_channels_last(call.weight), bias_of_smaller, bias;
  const bool sums_grad = call.is_transposed || grad.is_cuda();
  if (of_bias && !sums_grad) bias = bias_of_smaller = at::empty_symint({grad.sym_size(1)}, grad.options());
  if (of_weight.is_cuda()) {
    cuda::depthwise_weight_gradient(depthwise_on_cuda(call), grad, input, of_weight);
  } else if (!of_weight.is_meta()) {
    const auto tile = call.is_depthwise() ? std::nullopt : faster_winograd_tile(call, Pass::weight_gradient);
    if (tile) {
      cpu::winograd_weight_gradient(sizes_of(call), *tile, smaller, larger, of_weight, bias_of_smaller);
    } else {
      const auto compute = call.is_depthwise() ? cpu::depthwise_weight_gradient : cpu::weight_gradient;
      compute(sizes_of(call), smaller, larger, of_weight, bias_of_smaller);
    }
  }
  if (of_bias && sums_grad) bias = channels_to_end(grad).flatten(0, -2).sum(0);
  if (!is_channels_last(call.weight)) of_weight = of_weight.clone(at::MemoryFormat::Contiguous);
  return {of_weight, bias};
}

}  // namespace

at::SymDimVector output_sizes(const Call& call) {
  return call.is_transposed ? larger_sizes(call) : smaller_sizes(call);
}

at::Tensor forward(const Call& call, const cpu::Output& output) {
  const cpu::HugePages requested;
  const at::Tensor input = to_channels_last(call.input);
  return call.is_transposed ? from_smaller(call, input, call.bias) : from_larger(call, input, call.bias, output);
}

std::array<at::Tensor, 3> gradients(const Call& call, const at::Tensor& grad, std::array<bool, 3> needed) {
  const cpu::HugePages requested;
  const at::Tensor dense = to_channels_last(grad);
  at::Tensor of_input, of_weight, of_bias;
  if (needed[0]) of_input = call.is_transposed ? from_larger(call, dense, {}) : from_smaller(call, dense, {});
  if (needed[1] || needed[2]) std::tie(of_weight, of_bias) = weight_gradient(call, dense, needed[2]);
  return {of_input, needed[1] ? of_weight : at::Tensor(), of_bias};
}

}  // namespace kernels

namespace {

using Gradients = std::vector<at::Tensor>;  // of the input, the weight and the bias; undefined where not needed
using Mask = std::array<bool, 3>;

/// The same by operators, which compilers leave as they are.
namespace opaque {

at::Tensor forward(const Call& call) {
  using Forward = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, at::SymIntArrayRef,
                             at::SymIntArrayRef, at::SymIntArrayRef, bool, at::SymIntArrayRef, c10::SymInt);
  static const auto op = ops_detail::find<Forward>("nhwc::convolution_by_kernels");
  return op.call(call.input, call.weight, call.bias, call.stride, call.padding, call.dilation, call.is_transposed,
                 call.output_padding, call.groups);
}

std::array<at::Tensor, 3> gradients(const Call& call, const at::Tensor& grad, Mask needed) {
  using Backward = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
      const at::Tensor&, const at::Tensor&, const at::Tensor&, at::SymIntArrayRef, at::SymIntArrayRef,
      at::SymIntArrayRef, bool, at::SymIntArrayRef, c10::SymInt, Mask);
  static const auto op = ops_detail::find<Backward>("nhwc::convolution_by_kernels_backward");
  auto [of_input, of_weight, of_bias] = op.call(grad, call.input, call.weight, call.stride, call.padding, call.dilation,
                                                call.is_transposed, call.output_padding, call.groups, needed);
  return {of_input, of_weight, of_bias};
}

}  // namespace opaque

/// A convolution of one tap as a product of matrices, rows of pixels or voxels `[N * D * H * W, C]` and `[out, C]`. One
/// call of PyTorch's takes half the time of views that autograd sees.
namespace products {

at::Tensor rows_of(const at::Tensor& volume) {
  return memory_of(to_channels_last(volume), {volume.numel() / volume.size(1), volume.size(1)});
}

at::Tensor matrix_of(const at::Tensor& weight) {
  return memory_of(weight.contiguous(), {weight.size(0), weight.size(1)});
}

at::Tensor forward(const Call& call) {
  at::DimVector sizes(call.input.sizes());
  sizes[1] = call.weight.size(0);
  return as_new_channels_last(at::linear(rows_of(call.input), matrix_of(call.weight), call.bias), sizes);
}

Gradients gradients(const Call& call, const at::Tensor& grad, Mask needed) {
  const at::Tensor rows = rows_of(grad);
  Gradients found(3);
  if (needed[0]) found[0] = as_new_channels_last(rows.mm(matrix_of(call.weight)), call.input.sizes());
  if (needed[1]) {
    const at::Tensor product = rows.t().mm(rows_of(call.input));
    found[1] = has_channels_last_strides(call.weight) ? as_new_channels_last(product, call.weight.sizes())
                                                      : memory_of(product, call.weight.sizes());
  }
  if (needed[2]) found[2] = rows.sum(0);
  return found;
}

}  // namespace products

// PyTorch's.

at::Tensor as_computed(const at::Tensor& tensor, Others others) {
  if (others == Others::pytorch_in_contiguous && tensor.defined()) return to_contiguous(tensor);
  return others == Others::pytorch_in_float32 && tensor.defined() ? tensor.to(at::kFloat) : tensor;
}

/// Returns PyTorch's result, in the dtype and the format of the input.
at::Tensor pytorchs(const Call& call, Others others) {
  const OptionalTensor bias = call.has_bias() ? OptionalTensor(as_computed(*call.bias, others)) : OptionalTensor();
  const at::Tensor out =
      at::convolution_symint(as_computed(call.input, others), as_computed(call.weight, others), bias, call.stride,
                             call.padding, call.dilation, call.is_transposed, call.output_padding, call.groups)
          .to(call.input.scalar_type());
  return call.has_channels_last_input() ? to_channels_last(out) : out;
}

/// Returns PyTorch's gradients, which can be differentiated.
Gradients pytorchs_gradients(const Call& call, const at::Tensor& grad, Mask needed, Others others) {
  const std::array<c10::SymInt, 1> channels = {grad.sym_size(1)};
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      as_computed(grad, others), as_computed(call.input, others), as_computed(call.weight, others),
      at::OptionalSymIntArrayRef(channels), call.stride, call.padding, call.dilation, call.is_transposed,
      call.output_padding, call.groups, needed);
  const auto cast = [&](const at::Tensor& gradient) {
    return gradient.defined() ? gradient.to(call.input.scalar_type()) : gradient;
  };
  of_input = cast(of_input);
  if (of_input.defined() && is_channels_last(call.input)) of_input = to_channels_last(of_input);
  return {of_input, cast(of_weight), cast(of_bias)};
}

// All of them.

at::Tensor forward(const Call& call, const Choice& choice) {
  if (choice.kernels.forward) return call.is_compiled ? opaque::forward(call) : kernels::forward(call);
  return choice.others == Others::products ? products::forward(call) : pytorchs(call, choice.others);
}

Gradients gradients(const Call& call, const Choice& choice, const at::Tensor& grad, Mask needed) {
  const KernelPasses& ours = choice.kernels;
  const Others others = choice.others;
  const Mask by_kernels = {needed[0] && ours.input_gradient, needed[1] && ours.weight_gradient,
                           needed[2] && ours.weight_gradient};
  const Mask left = {needed[0] && !by_kernels[0], needed[1] && !by_kernels[1], needed[2] && !by_kernels[2]};
  const auto has_any = [](const Mask& mask) { return mask[0] || mask[1] || mask[2]; };
  Gradients found(3);
  if (has_any(left)) {
    found = others == Others::products ? products::gradients(call, grad, left)
                                       : pytorchs_gradients(call, grad, left, others);
  }
  if (!has_any(by_kernels)) return found;
  const auto compute = call.is_compiled ? opaque::gradients : kernels::gradients;
  const auto own = compute(call, grad, by_kernels);
  for (size_t index = 0; index < own.size(); ++index) {
    if (own[index].defined()) found[index] = own[index];
  }
  return found;
}

/// The numbers of a call and a choice that a backward needs, in one list, which autograd keeps for less than many.
std::vector<int64_t> as_numbers(const Call& call, const Choice& choice) {
  std::vector<int64_t> numbers = {call.groups.expect_int(),
                                  call.is_transposed,
                                  call.is_compiled,
                                  choice.kernels.input_gradient,
                                  choice.kernels.weight_gradient,
                                  static_cast<int64_t>(choice.others)};
  for (const at::SymDimVector* each : {&call.stride, &call.padding, &call.dilation, &call.output_padding}) {
    for (const c10::SymInt& size : *each) numbers.push_back(size.expect_int());
  }
  return numbers;
}

/// Returns what `as_numbers` was given, with no way.
std::pair<Call, Choice> from_numbers(const std::vector<at::Tensor>& saved, const std::vector<int64_t>& numbers) {
  constexpr size_t first = 6;
  const size_t axes = (numbers.size() - first) / 4;
  const auto sizes = [&](size_t index) {
    const auto begin = numbers.begin() + static_cast<std::ptrdiff_t>(first + index * axes);
    return at::SymDimVector(begin, begin + static_cast<std::ptrdiff_t>(axes));
  };
  Call call = {saved[0], saved[1], {}, sizes(0), sizes(1), sizes(2), numbers[0], sizes(3), numbers[1] != 0};
  call.is_compiled = numbers[2] != 0;
  return {std::move(call), {nullptr, {true, numbers[3] != 0, numbers[4] != 0}, static_cast<Others>(numbers[5])}};
}

const Formula by_their_passes = {
    "NhwcConvolutionBackward", [](const Gradients& gradients, const Formula::Context& context) -> Gradients {
      const at::Tensor& grad = gradients[0];
      if (!grad.defined()) return Gradients(3);
      const auto [call, choice] = from_numbers(context.saved, context.constants[0].toIntVector());
      const Mask needed = {context.needed[0], context.needed[1], context.needed[2]};
      const bool is_plain = are_plain({grad, call.input, call.weight}, call.is_compiled);
      if (at::GradMode::is_enabled() || !is_plain) return composed_gradients(call, grad, needed);
      return nhwc::gradients(call, choice, grad, needed);
    }};

std::array<at::Tensor, 3> inputs_of(const Call& call) {
  return {call.input, call.weight, call.bias.value_or(at::Tensor())};
}

/// Returns the result, with a derivative of our own.
at::Tensor computed(const Call& call, const Choice& choice) {
  const std::array<at::Tensor, 3> inputs = inputs_of(call);
  at::Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = forward(call, choice);
  }
  if (needs_gradient(inputs)) {
    record(by_their_passes, out, inputs, {call.input, call.weight}, {as_numbers(call, choice)});
  }
  return out;
}

/// Returns whether the passes may be computed below autograd, unseen.
bool may_be_computed(const Call& call) {
  return !call.is_composed && are_plain(inputs_of(call), call.is_compiled) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set(/*skip_infra_modes=*/call.is_compiled);
}

Call as_composed(const Call& call) {
  Call other = call;
  other.is_composed = true;
  return other;
}

/// Computes a convolution by its passes. Whoever observes PyTorch's operators sees them.
at::Tensor by_passes(const Call& call, const Choice& choice) {
  if (may_be_computed(call)) return computed(call, choice);
  return call.is_composed ? pytorchs(call, choice.others) : convolution(as_composed(call));
}

/// Lets a way change the call, which none may do twice.
at::Tensor rewritten(const Call& call, const Way& way) {
  const auto& before = call.rewritten_by;
  TORCH_INTERNAL_ASSERT(std::find(before.begin(), before.end(), &way) == before.end(), "nhwc: the way '", way.name,
                        "' leads to itself for input ", call.input.sym_sizes(), " and weight ",
                        call.weight.sym_sizes());
  Call once = call;
  once.rewritten_by.push_back(&way);
  return way.rewrite(once, convolution);
}

}  // namespace

at::Tensor convolution(const Call& call) {
  const cpu::HugePages requested;
  const Choice choice = choose(call);
  const Way& way = *choice.way;
  if (call.is_compiled && !way.in_graphs) return call.pytorchs();
  if (!way.rewrite) return by_passes(call, choice);
  return way.kind == Kind::pytorchs ? way.rewrite(call, convolution) : rewritten(call, way);
}

at::Tensor by_products(const Call& call, const cpu::Output& output) {
  const at::Tensor rows = products::rows_of(call.input), weight = products::matrix_of(call.weight);
  at::DimVector sizes(call.input.sizes());
  sizes[1] = weight.size(0);
  const at::Tensor product = at::empty({rows.size(0), sizes[1]}, rows.options());
  const bool in_parts = at::get_num_threads() == 1;
  const int64_t count = in_parts ? std::max<int64_t>(1, cpu::most_finished / sizes[1]) : rows.size(0);
  for (int64_t first = 0; first < rows.size(0); first += count) {
    const int64_t last = std::min(rows.size(0), first + count);
    at::Tensor some = product.slice(0, first, last);
    at::mm_out(some, rows.slice(0, first, last), weight.t());
    if (call.has_bias()) some.add_(*call.bias);  // PyTorch's product with a bias would write that to all rows before
    if (in_parts) output.finish(product, some.const_data_ptr(), some.numel());
  }
  if (!in_parts) output.finish(product);
  return as_new_channels_last(product, sizes);
}

at::Tensor by_all_kernels(const Call& call) {
  if (has_tangent(inputs_of(call))) return convolution(as_composed(call));
  return computed(call, {nullptr, {true, is_computable(call, Pass::input_gradient), true}});
}

Gradients composed_gradients(const Call& with_kernels, const at::Tensor& grad, Mask needed) {
  const Call call = as_composed(with_kernels);
  const bool is_differentiated = at::GradMode::is_enabled();
  const at::AutoGradMode as_in_forward(true);
  const Choice choice = choose(call);
  if (choice.way->kind == Kind::pytorchs || !choice.way->rewrite) {
    const at::AutoGradMode as_before(is_differentiated);
    return pytorchs_gradients(call, grad, needed, choice.others);
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

}  // namespace nhwc
