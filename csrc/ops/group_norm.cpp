// Group norm and instance norm on channels-last activations, under every dispatch key.
#include "cpu/group_norm.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "layout/channels_last.h"
#include "ops/autograd_node.h"
#include "torch_nhwc/ops.h"

namespace nhwc {
namespace {

using Optional = std::optional<at::Tensor>;
using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Mask = std::array<bool, 3>;

at::Tensor value_of(const Optional& tensor) { return tensor.value_or(at::Tensor()); }

using Forward = Results(const at::Tensor&, int64_t, const Optional&, const Optional&, double);
using Backward = Results(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const Optional&,
                         int64_t, double, Mask);

const auto& native_group_norm() {
  static const auto op = ops_detail::find<Forward>("nhwc::native_group_norm");
  return op;
}

const auto& native_group_norm_backward() {
  static const auto op = ops_detail::find<Backward>("nhwc::native_group_norm_backward");
  return op;
}

bool is_cast_with(at::ScalarType input, const Optional& parameter) {
  if (!parameter || !parameter->defined()) return true;
  const at::ScalarType type = parameter->scalar_type();
  return type == input || (type == at::kFloat && (input == at::kHalf || input == at::kBFloat16));
}

bool is_of_channels(const at::Tensor& input, const Optional& parameter) {
  return !parameter || !parameter->defined() || (parameter->dim() == 1 && parameter->sym_size(0) == input.sym_size(1));
}

/// Returns whether the kernels serve. PyTorch's own operator handles everything else, errors included.
bool is_served(const at::Tensor& input, int64_t groups, const Optional& weight, const Optional& bias) {
  const at::ScalarType type = input.scalar_type();
  const bool is_known = type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble;
  const auto of_both = [&](const at::Tensor& a, const at::Tensor& b) { return a.scalar_type() == b.scalar_type(); };
  return is_known && is_channels_last(input) && groups > 0 && input.sym_size(1) % groups == 0 &&
         is_cast_with(type, weight) && is_cast_with(type, bias) && is_of_channels(input, weight) &&
         is_of_channels(input, bias) &&
         (!value_of(weight).defined() || !value_of(bias).defined() || of_both(*weight, *bias));
}

void check(const at::Tensor& input, int64_t groups, const Optional& weight, const Optional& bias) {
  TORCH_CHECK(input.dim() >= 3 && input.dim() <= 5,
              "nhwc::native_group_norm: expected an input of 3 to 5 dimensions, got ", input.dim());
  TORCH_CHECK(groups > 0 && input.sym_size(1) % groups == 0,
              "nhwc::native_group_norm: expected a number of groups that "
              "divides the ",
              input.sym_size(1), " channels, got ", groups);
  for (const Optional& each : {weight, bias}) {
    TORCH_CHECK(is_of_channels(input, each), "nhwc::native_group_norm: expected a weight and a bias of ",
                input.sym_size(1), " elements, got one of shape ", each->sym_sizes());
    TORCH_CHECK(is_cast_with(input.scalar_type(), each), "nhwc::native_group_norm: expected a weight and a bias of ",
                input.scalar_type(), ", or of float for an input of half or bfloat16, got ", each->scalar_type());
  }
}

at::ScalarType type_of_statistics(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// Returns the shape in the form of the kernels. Raises where sums of rows would be empty.
cpu::GroupNormShape shape_of(const at::Tensor& input, int64_t groups) {
  const int64_t samples = input.size(0), channels = input.size(1);
  TORCH_CHECK(input.numel() > 0, "nhwc::native_group_norm: expected an input with elements, got one of shape ",
              input.sizes());
  return {samples, input.numel() / (samples * channels), channels, groups};
}

Results group_norm_cpu(const at::Tensor& input, int64_t groups, const Optional& weight, const Optional& bias,
                       double eps) {
  check(input, groups, weight, bias);
  const cpu::GroupNormShape shape = shape_of(input, groups);
  const at::Tensor dense = to_channels_last(input);
  at::Tensor out = empty_channels_last(input);
  const auto options = input.options().dtype(type_of_statistics(input));
  at::Tensor mean = at::empty({shape.samples, groups}, options), rstd = at::empty({shape.samples, groups}, options);
  cpu::group_norm(shape, dense, value_of(weight), value_of(bias), eps, out, mean, rstd);
  return {out, mean, rstd};
}

Results group_norm_backward_cpu(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean,
                                const at::Tensor& rstd, const Optional& weight, int64_t groups, double, Mask mask) {
  check(input, groups, weight, {});
  const cpu::GroupNormShape shape = shape_of(input, groups);
  const at::Tensor dense = to_channels_last(input), dense_grad = to_channels_last(grad.to(input.scalar_type()));
  const at::ScalarType type = value_of(weight).defined() ? weight->scalar_type() : input.scalar_type();
  const auto sums = [&](bool asked) {
    return asked ? at::empty({shape.channels}, input.options().dtype(at::kDouble)) : at::Tensor();
  };
  at::Tensor grad_input = mask[0] ? empty_channels_last(input) : at::Tensor();
  at::Tensor grad_weight = sums(mask[1]), grad_bias = sums(mask[2]);
  cpu::group_norm_backward(shape, dense_grad, dense, mean, rstd, value_of(weight), grad_input, grad_weight, grad_bias);
  return {grad_input, mask[1] ? grad_weight.to(type) : grad_weight, mask[2] ? grad_bias.to(type) : grad_bias};
}

// On other devices PyTorch's own kernels run, on contiguous memory.
Results group_norm_elsewhere(const at::Tensor& input, int64_t groups, const Optional& weight, const Optional& bias,
                             double eps) {
  check(input, groups, weight, bias);
  const int64_t samples = input.size(0), channels = input.size(1);
  auto [out, mean, rstd] = at::native_group_norm(input.contiguous(), weight, bias, samples, channels,
                                                 shape_of(input, groups).rows, groups, eps);
  return {to_channels_last(out), mean, rstd};
}

Results group_norm_backward_elsewhere(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean,
                                      const at::Tensor& rstd, const Optional& weight, int64_t groups, double,
                                      Mask mask) {
  const int64_t samples = input.size(0), channels = input.size(1);
  auto [grad_input, grad_weight, grad_bias] =
      at::native_group_norm_backward(grad.contiguous(), input.contiguous(), mean, rstd, weight, samples, channels,
                                     shape_of(input, groups).rows, groups, mask);
  return {mask[0] ? to_channels_last(grad_input) : grad_input, grad_weight, grad_bias};
}

Results group_norm_meta(const at::Tensor& input, int64_t groups, const Optional& weight, const Optional& bias, double) {
  check(input, groups, weight, bias);
  const auto options = input.options().dtype(type_of_statistics(input));
  const auto statistics = [&] { return at::empty_symint({input.sym_size(0), groups}, options); };
  return {empty_channels_last(input), statistics(), statistics()};
}

Results group_norm_backward_meta(const at::Tensor&, const at::Tensor& input, const at::Tensor&, const at::Tensor&,
                                 const Optional& weight, int64_t, double, Mask mask) {
  const at::ScalarType type = value_of(weight).defined() ? weight->scalar_type() : input.scalar_type();
  const auto parameter = [&](bool asked) {
    return asked ? at::empty_symint({input.sym_size(1)}, input.options().dtype(type)) : at::Tensor();
  };
  return {mask[0] ? empty_channels_last(input) : at::Tensor(), parameter(mask[1]), parameter(mask[2])};
}

// The same in PyTorch's differentiable functions, for derivatives of higher order, forward mode and vmap.

/// Views the input as `[N, rows, groups, channels of a group]`, in the dtype of the statistics.
at::Tensor grouped(const at::Tensor& input, int64_t groups) {
  const c10::SymInt of_group = input.sym_size(1) / groups;
  return channels_to_end(input).to(type_of_statistics(input)).reshape_symint({input.sym_size(0), -1, groups, of_group});
}

/// The inverse of `grouped`.
at::Tensor ungrouped(const at::Tensor& values, const at::Tensor& like) {
  return to_channels_last(
      channels_from_end(values.to(like.scalar_type()).reshape_symint(channels_to_end(like).sym_sizes())));
}

/// Views a parameter so that it broadcasts over grouped values.
at::Tensor of_groups(const at::Tensor& parameter, int64_t groups, at::ScalarType type) {
  return parameter.to(type).reshape_symint({groups, -1});
}

Results composed_group_norm(const at::Tensor& input, int64_t groups, const Optional& weight, const Optional& bias,
                            double eps) {
  check(input, groups, weight, bias);
  const at::Tensor values = grouped(input, groups);
  const auto [variance, mean] = at::var_mean(values, at::IntArrayRef{1, 3}, /*correction=*/0, /*keepdim=*/true);
  const at::Tensor rstd = (variance + eps).rsqrt();
  at::Tensor out = (values - mean) * rstd;
  if (value_of(weight).defined()) out = out * of_groups(*weight, groups, values.scalar_type());
  if (value_of(bias).defined()) out = out + of_groups(*bias, groups, values.scalar_type());
  return {ungrouped(out, input), mean.flatten(1).detach(), rstd.flatten(1).detach()};
}

Results composed_group_norm_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor&,
                                     const at::Tensor&, const Optional& weight, int64_t groups, double eps, Mask mask) {
  const at::Tensor values = grouped(input, groups), gradient = grouped(grad, groups).to(values.scalar_type());
  const auto [variance, mean] = at::var_mean(values, at::IntArrayRef{1, 3}, /*correction=*/0, /*keepdim=*/true);
  const at::Tensor rstd = (variance + eps).rsqrt(), normal = (values - mean) * rstd;
  Results results;
  if (mask[0]) {
    const bool has_weight = value_of(weight).defined();
    const at::Tensor weighted = has_weight ? gradient * of_groups(*weight, groups, values.scalar_type()) : gradient;
    const auto average = [](const at::Tensor& of) { return of.mean(at::IntArrayRef{1, 3}, /*keepdim=*/true); };
    std::get<0>(results) =
        ungrouped(rstd * (weighted - average(weighted) - normal * average(weighted * normal)), input);
  }
  const at::ScalarType type = value_of(weight).defined() ? weight->scalar_type() : input.scalar_type();
  const auto of_channels = [&](const at::Tensor& of) { return of.sum(at::IntArrayRef{0, 1}).flatten().to(type); };
  if (mask[1]) std::get<1>(results) = of_channels(gradient * normal);
  if (mask[2]) std::get<2>(results) = of_channels(gradient);
  return results;
}

// The gradients are those of the input, the weight and the bias, whose dtype is the weight's.
const Formula group_norm_formula = {
    "NhwcGroupNormBackward",
    [](const std::vector<at::Tensor>& gradients, const Formula::Context& context) -> std::vector<at::Tensor> {
      if (!gradients[0].defined()) return std::vector<at::Tensor>(3);
      const auto& saved = context.saved;
      const Optional weight = saved[3].defined() ? Optional(saved[3]) : Optional();
      auto [input, of_weight, of_bias] = native_group_norm_backward().call(
          gradients[0], saved[0], saved[1], saved[2], weight, context.constants[0].toInt(),
          context.constants[1].toDouble(), {context.needed[0], context.needed[1], context.needed[2]});
      return {input, of_weight, of_bias};
    }};

Results group_norm_autograd(c10::DispatchKeySet keys, const at::Tensor& input, int64_t groups, const Optional& weight,
                            const Optional& bias, double eps) {
  const std::array<at::Tensor, 3> inputs = {input, value_of(weight), value_of(bias)};
  if (has_tangent(inputs)) return composed_group_norm(input, groups, weight, bias, eps);
  Results results;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    results = native_group_norm().redispatch(keys & c10::after_autograd_keyset, input, groups, weight, bias, eps);
  }
  if (needs_gradient(inputs)) {
    const auto& [out, mean, rstd] = results;
    record(group_norm_formula, out, {input, inputs[1], inputs[2]}, {input, mean, rstd, inputs[1]}, {groups, eps});
  }
  return results;
}

Results group_norm_backward_autograd(c10::DispatchKeySet keys, const at::Tensor& grad, const at::Tensor& input,
                                     const at::Tensor& mean, const at::Tensor& rstd, const Optional& weight,
                                     int64_t groups, double eps, Mask mask) {
  const std::array<at::Tensor, 3> inputs = {grad, input, value_of(weight)};
  if (has_tangent(inputs) || needs_gradient(inputs)) {
    return composed_group_norm_backward(grad, input, mean, rstd, weight, groups, eps, mask);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return native_group_norm_backward().redispatch(keys & c10::after_autograd_keyset, grad, input, mean, rstd, weight,
                                                 groups, eps, mask);
}

at::Tensor group_norm_of_any(const at::Tensor& input, int64_t groups, const Optional& weight, const Optional& bias,
                             double eps) {
  if (!is_served(input, groups, weight, bias)) return at::group_norm(input, groups, weight, bias, eps);
  return std::get<0>(native_group_norm().call(input, groups, weight, bias, eps));
}

/// Updates running statistics as PyTorch does: with averages over the samples, of the unbiased variance.
void update(const at::Tensor& running_mean, const at::Tensor& running_var, const at::Tensor& input, double momentum) {
  const at::NoGradGuard without_gradient;
  const at::Tensor values = channels_to_end(input.detach()).flatten(1, -2).to(type_of_statistics(input));
  const auto [variance, mean] = at::var_mean(values, at::IntArrayRef{1}, /*correction=*/1);
  const auto update_one = [&](const at::Tensor& running, const at::Tensor& statistics) {
    running.mul_(1 - momentum).add_(statistics.mean(0).to(running.scalar_type()), momentum);
  };
  update_one(running_mean, mean);
  update_one(running_var, variance);
}

at::Tensor instance_norm_of_any(const at::Tensor& input, const Optional& running_mean, const Optional& running_var,
                                const Optional& weight, const Optional& bias, bool use_input_stats, double momentum,
                                double eps) {
  const bool is_tracked = value_of(running_mean).defined() && value_of(running_var).defined();
  if (!is_served(input, input.dim() > 1 ? input.size(1) : 0, weight, bias) || (!use_input_stats && !is_tracked) ||
      value_of(running_mean).defined() != value_of(running_var).defined()) {
    return at::instance_norm(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps,
                             /*cudnn_enabled=*/true);
  }
  if (!use_input_stats) {
    // PyTorch has no channels-last of three dimensions.
    const at::Tensor image = input.dim() == 3 ? input.unsqueeze(2) : input;
    return to_channels_last(at::batch_norm(image, weight, bias, running_mean, running_var, /*training=*/false, momentum,
                                           eps, /*cudnn_enabled=*/true)
                                .view_symint(input.sym_sizes()));
  }
  if (is_tracked) update(*running_mean, *running_var, input, momentum);
  return std::get<0>(native_group_norm().call(input, input.size(1), weight, bias, eps));
}

// Autocast has this rule for PyTorch's group norm on CUDA.
at::Tensor group_norm_in_float(const at::Tensor& input, int64_t groups, const Optional& weight, const Optional& bias,
                               double eps) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::autocast_dispatch_keyset);
  const c10::DeviceType device = input.device().type();
  const auto cast = [&](const auto& each) { return at::autocast::cached_cast(at::kFloat, each, device); };
  return group_norm_of_any(cast(input), groups, cast(weight), cast(bias), eps);
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CPU, m) {
  m.impl("native_group_norm", TORCH_FN(group_norm_cpu));
  m.impl("native_group_norm_backward", TORCH_FN(group_norm_backward_cpu));
}
TORCH_LIBRARY_IMPL(nhwc, CompositeExplicitAutograd, m) {
  m.impl("native_group_norm", TORCH_FN(group_norm_elsewhere));
  m.impl("native_group_norm_backward", TORCH_FN(group_norm_backward_elsewhere));
}
TORCH_LIBRARY_IMPL(nhwc, Meta, m) {
  m.impl("native_group_norm", TORCH_FN(group_norm_meta));
  m.impl("native_group_norm_backward", TORCH_FN(group_norm_backward_meta));
}
TORCH_LIBRARY_IMPL(nhwc, Autograd, m) {
  m.impl("native_group_norm", TORCH_FN(group_norm_autograd));
  m.impl("native_group_norm_backward", TORCH_FN(group_norm_backward_autograd));
}
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) {
  m.impl("native_group_norm", TORCH_FN(composed_group_norm));
  m.impl("native_group_norm_backward", TORCH_FN(composed_group_norm_backward));
  m.impl("group_norm", TORCH_FN(group_norm_of_any));
  m.impl("instance_norm", TORCH_FN(instance_norm_of_any));
}
TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) {
  m.impl("group_norm", TORCH_FN(group_norm_of_any));
  m.impl("instance_norm", TORCH_FN(instance_norm_of_any));
}
TORCH_LIBRARY_IMPL(nhwc, AutocastCUDA, m) { m.impl("group_norm", TORCH_FN(group_norm_in_float)); }

}  // namespace nhwc
