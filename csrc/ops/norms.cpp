// Group norm, instance norm and batch norm on channels-last activations, under every dispatch key.
#include "cuda/norms.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/group_norm.h"
#include "cpu/pages.h"
#include "layout/channels_last.h"
#include "ops/autograd_node.h"
#include "ops/composition.h"
#include "ops/norm.h"
#include "torch_nhwc/ops.h"

namespace nhwc {
namespace {

/// Returns whether PyTorch's group norm keeps the format on a GPU, from 2.15 on. With a channel in each group it does
/// so too, but has a single block for each.
bool is_kept_by_pytorch(const Norm& norm) {
  constexpr bool keeps = TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 15);
  return keeps && !norm.is_batch_norm && norm.input.is_cuda() && norm.input.dim() > 3 &&
         norm.groups < norm.input.size(1);
}

/// Returns whether PyTorch's batch norm on a GPU is as fast as ours: of images by cuDNN, whose kernels are for
/// channels-last, too, and not for bfloat16, and of few bytes. That of volumes takes up to nine times as long.
bool is_fast_in_pytorch(const Norm& norm) {
  constexpr size_t least_bytes = 16 << 20;
  const bool has_cudnn = norm.type() != at::kBFloat16 && norm.type() != at::kDouble;
  return norm.is_batch_norm && norm.input.dim() == 4 && (has_cudnn || norm.input.nbytes() < least_bytes);
}

/// Returns a bias as the kernels read it, in the dtype of the norm's own numbers.
at::Tensor as_parameter(const Norm& norm, const at::Tensor& input_bias) {
  if (!input_bias.defined()) return {};
  const at::Tensor& running = norm.running_mean;
  const at::ScalarType type = norm.weight.defined() || norm.bias.defined() || !running.defined()
                                  ? norm.type_of_parameters()
                                  : running.scalar_type();
  return input_bias.detach().to(type).contiguous();
}

}  // namespace

std::optional<cuda::GroupNorm> find_cuda_norm(const Norm& norm, double momentum, bool is_float,
                                              const at::Tensor& input_bias) {
  const at::Device device = norm.input.device();
  for (const at::Tensor* each : norm.of_channels()) {
    if (each->defined() && (each->device() != device || !each->is_contiguous())) return std::nullopt;
  }
  if (norm.input.numel() == 0 || is_fast_in_pytorch(norm)) return std::nullopt;
  const auto [samples, rows, channels, groups] = norm.shape();
  const auto kind = norm.is_batch_norm   ? cuda::NormKind::batch
                    : groups == channels ? cuda::NormKind::instance
                                         : cuda::NormKind::group;
  if (!cuda::runs_norm(device, kind, static_cast<int64_t>(norm.input.nbytes()))) return std::nullopt;
  // Where nobody has compared the speed of kernels that keep channels-last, ours run only if a user switched them on.
  const bool is_mixed = is_float || norm.type_of_parameters() != norm.type();
  const bool is_chosen = cuda::is_measured(device) || cuda::norm_switch().value_or(false);
  if (is_kept_by_pytorch(norm) && !is_mixed && !is_chosen) return std::nullopt;
  const cuda::GroupNorm found{samples,
                              rows,
                              groups,
                              to_channels_last(norm.input),
                              is_float ? at::kFloat : norm.type(),
                              norm.weight,
                              norm.bias,
                              norm.running_mean,
                              norm.running_var,
                              momentum,
                              norm.eps,
                              norm.is_of_input,
                              as_parameter(norm, input_bias)};
  return cuda::can_run(found) ? std::optional(found) : std::nullopt;
}

namespace {

using Mask = std::array<bool, 3>;
using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
/// The output, and of each group the mean, the reciprocal deviation and, where it is requested, the biased variance.
using Normed = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Returns what an operator returns: all, or all but the variance.
template <typename Returned>
Returned returned(Normed normed) {
  if constexpr (std::is_same_v<Returned, Normed>) return normed;
  if constexpr (std::is_same_v<Returned, Results>) {
    return {std::move(std::get<0>(normed)), std::move(std::get<1>(normed)), std::move(std::get<2>(normed))};
  }
}

// --- Forward: kernels of a CPU, PyTorch's own, and shapes alone ---

/// Returns an activation or its gradient as PyTorch's group norm takes it. Only that of a CPU takes parameters of
/// another dtype.
at::Tensor for_pytorch(const Norm& norm, const at::Tensor& activation) {
  const at::Tensor cast = activation.is_cpu() ? activation : activation.to(norm.type_of_parameters());
  return is_kept_by_pytorch(norm) ? to_channels_last(cast) : cast.contiguous();
}

/// Computes with PyTorch's own operator: on other devices, in forward mode, under vmap, and in batch norm's evaluation.
Normed norm_by_pytorch(const Norm& norm, double momentum) {
  norm.check_forward();
  const at::ScalarType type = norm.type_of_statistics();
  if (!norm.is_batch_norm) {
    const auto [samples, rows, channels, groups] = norm.shape();
    const auto [out, mean, rstd] =
        at::native_group_norm(for_pytorch(norm, norm.input), optional_of(norm.weight), optional_of(norm.bias), samples,
                              channels, rows, groups, norm.eps);
    at::Tensor variance;
    if (norm.has_variance) {  // the groups of instance norm are the channels
      variance =
          at::var(channels_to_end(norm.input.detach()).to(type).flatten(1, -2), at::IntArrayRef{1}, /*correction=*/0);
    }
    return {to_channels_last(out.to(norm.type())), mean.detach().to(type), rstd.detach().to(type), variance};
  }
  auto [out, mean, rstd] = at::native_batch_norm(norm.input, optional_of(norm.weight), optional_of(norm.bias),
                                                 optional_of(norm.running_mean), optional_of(norm.running_var),
                                                 norm.is_of_input, momentum, norm.eps);
  if (!norm.is_of_input) {  // in memory of their own: training may change the running statistics before the backward
    return {to_channels_last(out), norm.running_mean.detach().to(type, /*non_blocking=*/false, /*copy=*/true),
            (norm.running_var.detach().to(at::kDouble) + norm.eps).rsqrt().to(type), at::Tensor()};
  }
  return {to_channels_last(out), mean.detach().to(type), rstd.detach().to(type), at::Tensor()};
}

Normed norm_cpu(const Norm& norm, double momentum) {
  const cpu::HugePages requested;
  if (!norm.is_of_input) return norm_by_pytorch(norm, momentum);
  norm.check_forward();
  const cpu::GroupNormShape shape = norm.shape();
  const bool is_tracked = norm.running_mean.defined();
  const auto options = norm.input.options().dtype(norm.type_of_statistics());
  const auto sizes = norm.is_batch_norm ? at::DimVector{shape.channels} : at::DimVector{shape.samples, shape.groups};
  const at::Tensor dense = to_channels_last(norm.input), out = empty_channels_last(norm.input),
                   mean = at::empty(sizes, options), rstd = at::empty(sizes, options),
                   variance = is_tracked          ? at::empty(sizes, options.dtype(at::kDouble))
                              : norm.has_variance ? at::empty(sizes, options)
                                                  : at::Tensor();
  cpu::group_norm(shape, dense, norm.weight, norm.bias, norm.eps, out, mean, rstd, variance);
  if (is_tracked) {
    update(norm.running_mean, mean, momentum);
    update(norm.running_var, variance, momentum, unbiasing(shape.rows));
  }
  return {out, mean, rstd, norm.has_variance ? variance : at::Tensor()};
}

Normed norm_cuda(const Norm& norm, double momentum) {
  norm.check_forward();
  const auto on_device = find_cuda_norm(norm, momentum);
  if (!on_device) return norm_by_pytorch(norm, momentum);
  const auto statistics = [&] {
    return at::empty_symint(norm.sizes_of_statistics(), norm.input.options().dtype(norm.type_of_statistics()));
  };
  const at::Tensor out = empty_channels_last(norm.input), mean = statistics(), rstd = statistics(),
                   variance = norm.has_variance ? statistics() : at::Tensor();
  cuda::group_norm(*on_device, out, mean, rstd, variance);
  return {out, mean, rstd, variance};
}

Normed norm_meta(const Norm& norm, double) {
  norm.check_forward();
  const at::SymDimVector sizes = norm.sizes_of_statistics();
  const auto options = norm.input.options().dtype(norm.type_of_statistics());
  const auto statistics = [&] { return at::empty_symint(sizes, options); };
  return {empty_channels_last(norm.input), statistics(), statistics(), norm.has_variance ? statistics() : at::Tensor()};
}

// --- Backward ---

/// Returns memory for the gradient of the weight or the bias if it is requested.
at::Tensor empty_parameter(const Norm& norm, bool is_requested) {
  if (!is_requested) return {};
  return at::empty_symint({norm.channels()}, norm.input.options().dtype(norm.type_of_parameters()));
}

Results backward_cpu(const Norm& norm, const at::Tensor& grad, const at::Tensor& mean, const at::Tensor& rstd,
                     Mask mask) {
  const cpu::HugePages requested;
  norm.check_backward(grad, mean, rstd);
  const cpu::GroupNormShape shape = norm.shape();
  const at::Tensor grad_input = mask[0] ? empty_channels_last(norm.input) : at::Tensor(),
                   grad_weight = empty_parameter(norm, mask[1]), grad_bias = empty_parameter(norm, mask[2]);
  cpu::group_norm_backward(shape, to_channels_last(grad), to_channels_last(norm.input), mean.contiguous(),
                           rstd.contiguous(), norm.weight, grad_input, grad_weight, grad_bias, norm.is_of_input);
  return {grad_input, grad_weight, grad_bias};
}

Results backward_meta(const Norm& norm, const at::Tensor& grad, const at::Tensor& mean, const at::Tensor& rstd,
                      Mask mask) {
  norm.check_backward(grad, mean, rstd);
  return {mask[0] ? empty_channels_last(norm.input) : at::Tensor(), empty_parameter(norm, mask[1]),
          empty_parameter(norm, mask[2])};
}

/// Computes the gradients in PyTorch's differentiable functions, for derivatives of higher order, forward mode, vmap
/// and other devices. Statistics that depend on the input are computed anew.
Results backward_composed(const Norm& norm, const at::Tensor& grad, const at::Tensor& mean, const at::Tensor& rstd,
                          Mask mask) {
  norm.check_backward(grad, mean, rstd);
  const at::ScalarType type = norm.type_of_statistics();
  const auto sizes = norm.grouped_sizes();
  const auto grouped = [&](const at::Tensor& values) { return channels_to_end(values).to(type).reshape_symint(sizes); };
  const auto average = [](const at::Tensor& of) { return of.mean(at::IntArrayRef{1, 3}, /*keepdim=*/true); };
  const at::Tensor values = grouped(norm.input), gradient = grouped(grad);
  at::Tensor center, scale;
  if (norm.is_of_input) {
    const auto [variance, center_] = at::var_mean(values, at::IntArrayRef{1, 3}, /*correction=*/0, /*keepdim=*/true);
    center = center_, scale = (variance + norm.eps).rsqrt();
  } else {
    const std::array<c10::SymInt, 4> of_statistics = {sizes[0], 1, sizes[2], 1};
    center = mean.reshape_symint(of_statistics), scale = rstd.reshape_symint(of_statistics);
  }
  const at::Tensor normal = (values - center) * scale;
  Results results;
  if (mask[0]) {
    at::Tensor weighted = gradient;
    if (norm.weight.defined()) weighted = gradient * norm.weight.to(type).reshape_symint({sizes[2], sizes[3]});
    if (norm.is_of_input) weighted = weighted - average(weighted) - normal * average(weighted * normal);
    const at::Tensor rows = (scale * weighted).to(norm.type());
    std::get<0>(results) =
        to_channels_last(channels_from_end(rows.reshape_symint(channels_to_end(norm.input).sym_sizes())));
  }
  const auto of_channels = [&](const at::Tensor& of) {
    return of.sum(at::IntArrayRef{0, 1}).reshape({-1}).to(norm.type_of_parameters());
  };
  if (mask[1]) std::get<1>(results) = of_channels(gradient * normal);
  if (mask[2]) std::get<2>(results) = of_channels(gradient);
  return results;
}

/// On other devices PyTorch has a kernel for group norm. It takes statistics of the dtype that its forward returns.
Results backward_elsewhere(const Norm& norm, const at::Tensor& grad, const at::Tensor& mean, const at::Tensor& rstd,
                           Mask mask) {
  if (norm.is_batch_norm) return backward_composed(norm, grad, mean, rstd, mask);
  norm.check_backward(grad, mean, rstd);
  const auto [samples, rows, channels, groups] = norm.shape();
  const at::ScalarType type = norm.type_of_parameters();
  auto [grad_input, grad_weight, grad_bias] = at::native_group_norm_backward(
      for_pytorch(norm, grad), for_pytorch(norm, norm.input), mean.to(type).contiguous(), rstd.to(type).contiguous(),
      optional_of(norm.weight), samples, channels, rows, groups, mask);
  return {mask[0] ? to_channels_last(grad_input.to(norm.type())) : grad_input, grad_weight, grad_bias};
}

Results backward_cuda(const Norm& norm, const at::Tensor& grad, const at::Tensor& mean, const at::Tensor& rstd,
                      Mask mask) {
  norm.check_backward(grad, mean, rstd);
  const auto on_device = find_cuda_norm(norm, 0);
  if (!on_device) return backward_elsewhere(norm, grad, mean, rstd, mask);
  const at::Tensor grad_input = mask[0] ? empty_channels_last(norm.input) : at::Tensor(),
                   grad_weight = empty_parameter(norm, mask[1]), grad_bias = empty_parameter(norm, mask[2]);
  cuda::group_norm_backward(*on_device, to_channels_last(grad), mean.contiguous(), rstd.contiguous(), grad_input,
                            grad_weight, grad_bias);
  return {grad_input, grad_weight, grad_bias};
}

// --- The operators, for each of these ---

using Forward = Normed (*)(const Norm&, double momentum);
using Backward = Results (*)(const Norm&, const at::Tensor& grad, const at::Tensor& mean, const at::Tensor& rstd, Mask);

template <Forward compute>
Results group_norm(const at::Tensor& input, int64_t groups, const Optional& weight, const Optional& bias, double eps) {
  return returned<Results>(compute(group_norm_of(input, groups, weight, bias, eps), 0));
}

template <Forward compute>
Normed instance_norm(const at::Tensor& input, const Optional& weight, const Optional& bias, double eps) {
  return compute(instance_norm_of(input, none, none, weight, bias, true, eps), 0);
}

template <Forward compute>
Results batch_norm(const at::Tensor& input, const Optional& running_mean, const Optional& running_var,
                   const Optional& weight, const Optional& bias, bool training, double momentum, double eps) {
  const Norm norm = batch_norm_of(input, running_mean, running_var, weight, bias, training, eps);
  return returned<Results>(compute(norm, momentum));
}

// The backwards differ in one argument: the number of groups, or whether batch norm is in training.
Norm norm_of(const at::Tensor& input, const Optional& weight, int64_t groups, double eps) {
  return group_norm_of(input, groups, weight, none, eps);
}
Norm norm_of(const at::Tensor& input, const Optional& weight, bool training, double eps) {
  return batch_norm_of(input, none, none, weight, none, training, eps);
}

template <Backward compute, typename How>
Results backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& rstd,
                 const Optional& weight, How how, double eps, Mask mask) {
  return compute(norm_of(input, weight, how, eps), grad, mean, rstd, mask);
}

/// Returns the operator with the signature of a kernel.
template <auto kernel>
const auto& native(const char* name) {
  static const auto op = ops_detail::find<std::remove_pointer_t<decltype(kernel)>>(name);
  return op;
}
const auto& native_group_norm() { return native<group_norm<norm_cpu>>("nhwc::native_group_norm"); }
const auto& native_instance_norm() { return native<instance_norm<norm_cpu>>("nhwc::native_instance_norm"); }
const auto& native_batch_norm() { return native<batch_norm<norm_cpu>>("nhwc::native_batch_norm"); }
template <typename How>
const auto& native_backward() {
  return native<backward<backward_cpu, How>>(std::is_same_v<How, bool> ? "nhwc::native_batch_norm_backward"
                                                                       : "nhwc::native_group_norm_backward");
}

// --- Autograd ---

/// Returns the gradients of the input, the weight and the bias, whose dtype is the weight's.
template <typename How>
std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& gradients, const Formula::Context& context) {
  if (!gradients[0].defined()) return std::vector<at::Tensor>(3);
  const auto& [saved, constants, needed] = context;
  auto [input, weight, bias] = native_backward<How>().call(gradients[0], saved[0], saved[1], saved[2],
                                                           optional_of(saved[3]), constants[0].template to<How>(),
                                                           constants[1].toDouble(), {needed[0], needed[1], needed[2]});
  return {input, weight, bias};
}

const Formula group_norm_formula = {"NhwcGroupNormBackward", gradients_of<int64_t>};
const Formula batch_norm_formula = {"NhwcBatchNormBackward", gradients_of<bool>};

/// Calls `compute` below autograd, and records the derivative of its first result if there is one.
template <typename Returned, typename Compute>
Returned differentiable(const Norm& norm, double momentum, const Compute& compute) {
  const std::array<at::Tensor, 3> inputs = {norm.input, norm.weight, norm.bias};
  if (has_tangent(inputs)) return returned<Returned>(norm_by_pytorch(norm, momentum));
  Returned results = [&] {
    const at::AutoDispatchBelowADInplaceOrView below;
    return compute();
  }();
  if (!needs_gradient(inputs)) return results;
  // As in PyTorch, a running statistic that changes before the backward is an error, although nothing reads it there.
  const std::array<at::Tensor, 6> saved = {norm.input,  std::get<1>(results), std::get<2>(results),
                                           norm.weight, norm.running_mean,    norm.running_var};
  if (norm.is_batch_norm) {
    record(batch_norm_formula, std::get<0>(results), inputs, saved, {norm.is_of_input, norm.eps});
  } else {
    record(group_norm_formula, std::get<0>(results), inputs, saved, {norm.groups, norm.eps});
  }
  return results;
}

Results group_norm_autograd(c10::DispatchKeySet keys, const at::Tensor& input, int64_t groups, const Optional& weight,
                            const Optional& bias, double eps) {
  return differentiable<Results>(group_norm_of(input, groups, weight, bias, eps), 0, [&] {
    return native_group_norm().redispatch(keys & c10::after_autograd_keyset, input, groups, weight, bias, eps);
  });
}

Normed instance_norm_autograd(c10::DispatchKeySet keys, const at::Tensor& input, const Optional& weight,
                              const Optional& bias, double eps) {
  return differentiable<Normed>(instance_norm_of(input, none, none, weight, bias, true, eps), 0, [&] {
    return native_instance_norm().redispatch(keys & c10::after_autograd_keyset, input, weight, bias, eps);
  });
}

Results batch_norm_autograd(c10::DispatchKeySet keys, const at::Tensor& input, const Optional& running_mean,
                            const Optional& running_var, const Optional& weight, const Optional& bias, bool training,
                            double momentum, double eps) {
  const Norm norm = batch_norm_of(input, running_mean, running_var, weight, bias, training, eps);
  return differentiable<Results>(norm, momentum, [&] {
    return native_batch_norm().redispatch(keys & c10::after_autograd_keyset, input, running_mean, running_var, weight,
                                          bias, training, momentum, eps);
  });
}

template <typename How>
Results backward_autograd(c10::DispatchKeySet keys, const at::Tensor& grad, const at::Tensor& input,
                          const at::Tensor& mean, const at::Tensor& rstd, const Optional& weight, How how, double eps,
                          Mask mask) {
  const std::array<at::Tensor, 3> inputs = {grad, input, value_of(weight)};
  if (has_tangent(inputs) || needs_gradient(inputs)) {
    return backward<backward_composed, How>(grad, input, mean, rstd, weight, how, eps, mask);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return native_backward<How>().redispatch(keys & c10::after_autograd_keyset, grad, input, mean, rstd, weight, how, eps,
                                           mask);
}

// --- What models call: PyTorch's own operator unless the kernels serve, and gain ---

at::Tensor group_norm_of_any(const at::Tensor& input, int64_t groups, const Optional& weight, const Optional& bias,
                             double eps) {
  const Norm norm = group_norm_of(input, groups, weight, bias, eps);
  if (!norm.is_served()) return at::group_norm(input, groups, weight, bias, eps);
  if (norm.is_on_cpu() && is_unobserved({norm.input, norm.weight, norm.bias})) {
    // One position is contiguous memory, too, of which PyTorch's kernels are right, and take less for each sample.
    if (input.numel() == input.size(0) * input.size(1)) {
      return to_channels_last(at::group_norm(input, groups, weight, bias, eps));
    }
    // Two calls of the dispatcher less.
    return std::get<0>(differentiable<Normed>(norm, 0, [&] { return norm_cpu(norm, 0); }));
  }
  return std::get<0>(native_group_norm().call(input, groups, weight, bias, eps));
}

// Autocast has this rule for PyTorch's group norm on CUDA.
at::Tensor group_norm_in_float(const at::Tensor& input, int64_t groups, const Optional& weight, const Optional& bias,
                               double eps) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::autocast_dispatch_keyset);
  const c10::DeviceType device = input.device().type();
  const auto cast = [&](const auto& each) { return at::autocast::cached_cast(at::kFloat, each, device); };
  return group_norm_of_any(cast(input), groups, cast(weight), cast(bias), eps);
}

// Rows that a thread has of a batch norm, from which on our kernels serve. PyTorch's add all of them to one float, so
// their error grows with the rows: in training that of a weight's gradient most, a small difference of large numbers
// where activations and gradients are far from zero. In evaluation only the gradients of the parameters are sums, and
// of numbers that have no error yet. With fewer rows PyTorch's are as fast, or faster.
constexpr int64_t rows_in_training = 320, rows_in_evaluation = 32768;

bool gains(const Norm& norm) {
  if (norm.input.is_cuda()) return norm.input.dim() >= 4 && norm.eps > 0 && find_cuda_norm(norm, 0);
  if (!norm.is_on_cpu() || norm.input.dim() < 4 || norm.eps <= 0 ||
      (!norm.is_of_input && !needs_gradient({norm.input, norm.weight, norm.bias}))) {  // PyTorch's output is right
    return false;
  }
  const c10::SymInt rows = norm.input.sym_numel() / norm.channels() / at::get_num_threads();
  return rows >= (norm.is_of_input ? rows_in_training : rows_in_evaluation);
}

at::Tensor batch_norm_of_any(const at::Tensor& input, const Optional& running_mean, const Optional& running_var,
                             const Optional& weight, const Optional& bias, bool training, double momentum, double eps) {
  const Norm norm = batch_norm_of(input, running_mean, running_var, weight, bias, training, eps);
  if (!norm.is_served() || !gains(norm)) {
    // PyTorch's gradient goes by a stride in a size of 1.
    const at::Tensor given = input.is_cpu() && has_odd_strides(input) ? with_canonical_strides(input) : input;
    return at::batch_norm(given, weight, bias, running_mean, running_var, training, momentum, eps,
                          at::globalContext().userEnabledCuDNN());
  }
  return std::get<0>(native_batch_norm().call(input, running_mean, running_var, weight, bias, training, momentum, eps));
}

/// Updates a running statistic of instance norm as PyTorch does: with the average over the samples.
void update_with_average(const at::Tensor& running, const at::Tensor& statistic, double momentum, double factor = 1) {
  const at::NoGradGuard without_gradient;
  const at::Tensor average = statistic.detach().mean(0);
  running.copy_(running.to(average.scalar_type()).mul(1 - momentum).add_(average, momentum * factor));
}

at::Tensor instance_norm_of_any(const at::Tensor& input, const Optional& running_mean, const Optional& running_var,
                                const Optional& weight, const Optional& bias, bool use_input_stats, double momentum,
                                double eps) {
  const Norm norm = instance_norm_of(input, running_mean, running_var, weight, bias, use_input_stats, eps);
  if (!norm.is_served()) {
    return at::instance_norm(input, weight, bias, running_mean, running_var, use_input_stats, momentum, eps,
                             /*cudnn_enabled=*/true);
  }
  // PyTorch's operator copies these as well: they may change before the backward.
  const bool is_recorded = needs_gradient({norm.input, norm.weight, norm.bias});
  const auto kept = [&](const at::Tensor& each) {
    return each.defined() ? Optional(is_recorded ? each.clone() : each) : std::nullopt;
  };
  if (!use_input_stats) {
    // PyTorch has no channels-last of three dimensions.
    const at::Tensor image = input.dim() == 3 ? input.unsqueeze(2) : input;
    return to_channels_last(batch_norm_of_any(image, kept(norm.running_mean), kept(norm.running_var), kept(norm.weight),
                                              bias, /*training=*/false, momentum, eps)
                                .view_symint(input.sym_sizes()));
  }
  if (!norm.running_mean.defined()) {
    return std::get<0>(native_group_norm().call(input, norm.groups, kept(norm.weight), bias, eps));
  }
  const auto [out, mean, rstd, variance] = native_instance_norm().call(input, kept(norm.weight), bias, eps);
  update_with_average(norm.running_mean, mean, momentum);
  update_with_average(norm.running_var, variance, momentum, unbiasing(norm.shape().rows));
  return out;
}

template <Forward forward, Backward gradients>
void implement(torch::Library& m) {
  m.impl("native_group_norm", TORCH_FN(group_norm<forward>));
  m.impl("native_instance_norm", TORCH_FN(instance_norm<forward>));
  m.impl("native_batch_norm", TORCH_FN(batch_norm<forward>));
  m.impl("native_group_norm_backward", TORCH_FN((backward<gradients, int64_t>)));
  m.impl("native_batch_norm_backward", TORCH_FN((backward<gradients, bool>)));
}

void implement_compositions(torch::Library& m) {
  m.impl("group_norm", TORCH_FN(group_norm_of_any));
  m.impl("instance_norm", TORCH_FN(instance_norm_of_any));
  m.impl("batch_norm", TORCH_FN(batch_norm_of_any));
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CPU, m) { implement<norm_cpu, backward_cpu>(m); }
TORCH_LIBRARY_IMPL(nhwc, CUDA, m) { implement<norm_cuda, backward_cuda>(m); }
TORCH_LIBRARY_IMPL(nhwc, CompositeExplicitAutograd, m) { implement<norm_by_pytorch, backward_elsewhere>(m); }
TORCH_LIBRARY_IMPL(nhwc, Meta, m) { implement<norm_meta, backward_meta>(m); }
TORCH_LIBRARY_IMPL(nhwc, Autograd, m) {
  m.impl("native_group_norm", TORCH_FN(group_norm_autograd));
  m.impl("native_instance_norm", TORCH_FN(instance_norm_autograd));
  m.impl("native_batch_norm", TORCH_FN(batch_norm_autograd));
  m.impl("native_group_norm_backward", TORCH_FN(backward_autograd<int64_t>));
  m.impl("native_batch_norm_backward", TORCH_FN(backward_autograd<bool>));
}
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) {
  implement<norm_by_pytorch, backward_composed>(m);
  implement_compositions(m);
}
TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { implement_compositions(m); }
TORCH_LIBRARY_IMPL(nhwc, AutocastCUDA, m) { m.impl("group_norm", TORCH_FN(group_norm_in_float)); }

}  // namespace nhwc
