// Batch norm on channels-last activations of a CPU, under every dispatch key.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "cpu/group_norm.h"
#include "layout/channels_last.h"
#include "ops/autograd_node.h"
#include "torch_nhwc/ops.h"

namespace nhwc {
namespace {

using Optional = std::optional<at::Tensor>;
using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using Mask = std::array<bool, 3>;

// PyTorch's kernels add a thread's share of a channel into one float, so their error grows with its rows. Relative in
// norm, against float64, on one thread: in training a weight's gradient, which is a small difference of large numbers
// where activations and gradients have means of one deviation, is off by 5e-6 from 300 rows, 1e-5 from 511, 3e-5 from
// 2,000; with activations ten deviations from zero by 5e-5, 1e-4 and 3e-4, and the output by 3e-6 from 511. In
// evaluation only gradients of parameters are sums, and of numbers that have no error yet: 5e-6 from 32,767 rows.
// Time over PyTorch's, forward and with backward, from 3 to 4,096 channels: in training 0.9 to 1.0 for 320 rows, less
// for more, and up to 1.1 for 128 rows; in evaluation 0.3 to 0.9 for 32,768 rows, 1.1 for 512.
constexpr int64_t rows_in_training = 320, rows_in_evaluation = 32768;

bool is_given(const Optional& tensor) { return tensor && tensor->defined(); }
at::Tensor value_of(const Optional& tensor) { return tensor.value_or(at::Tensor()); }

using Forward = Results(const at::Tensor&, const Optional&, const Optional&, const Optional&, const Optional&, bool,
                        double, double);
using Backward = Results(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const Optional&,
                         bool, double, Mask);

const auto& native_batch_norm() {
  static const auto op = ops_detail::find<Forward>("nhwc::native_batch_norm");
  return op;
}

const auto& native_batch_norm_backward() {
  static const auto op = ops_detail::find<Backward>("nhwc::native_batch_norm_backward");
  return op;
}

/// The tensors with a number for each channel.
using OfChannels = std::array<std::reference_wrapper<const Optional>, 4>;

bool have_numbers_of_channels(const at::Tensor& input, const OfChannels& given) {
  for (const Optional& each : given) {
    if (is_given(each) && (each->dim() != 1 || each->sym_size(0) != input.sym_size(1))) return false;
  }
  return true;
}

/// Returns whether all have the dtype of the input, or all have float32 for an input of half or bfloat16.
bool are_cast_with(const at::Tensor& input, const OfChannels& given) {
  const at::ScalarType type = input.scalar_type();
  const bool may_be_mixed = type == at::kHalf || type == at::kBFloat16;
  bool is_same = true, is_mixed = may_be_mixed;
  for (const Optional& each : given) {
    if (!is_given(each)) continue;
    is_same &= each->scalar_type() == type;
    is_mixed &= each->scalar_type() == at::kFloat;
  }
  return is_same || is_mixed;
}

/// Returns whether the kernels serve, and gain. PyTorch's own operator handles everything else, errors included.
bool is_served(const at::Tensor& input, const Optional& running_mean, const Optional& running_var,
               const Optional& weight, const Optional& bias, bool training, double eps) {
  const at::ScalarType type = input.scalar_type();
  const bool is_known = type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble;
  const OfChannels given = {running_mean, running_var, weight, bias};
  for (const Optional& each : given) {
    if (is_given(each) && !each->is_cpu()) return false;
  }
  const bool is_tracked = is_given(running_mean) && is_given(running_var);
  if (!is_known || !input.is_cpu() || input.dim() < 4 || !is_channels_last(input) || eps <= 0 ||
      is_given(running_mean) != is_given(running_var) || (!training && !is_tracked) ||
      !have_numbers_of_channels(input, given) || !are_cast_with(input, given)) {
    return false;
  }
  if (!training && !needs_gradient({input, value_of(weight), value_of(bias)})) return false;  // the output is right
  const c10::SymInt channels = input.sym_size(1), rows = input.sym_numel() / channels / at::get_num_threads();
  return rows >= (training ? rows_in_training : rows_in_evaluation);
}

void check(const at::Tensor& input, const Optional& running_mean, const Optional& running_var, const Optional& weight,
           const Optional& bias, bool training) {
  const OfChannels given = {running_mean, running_var, weight, bias};
  TORCH_CHECK(input.dim() == 4 || input.dim() == 5,
              "nhwc::native_batch_norm: expected an input of 4 or 5 dimensions, got ", input.dim());
  TORCH_CHECK(input.sym_numel() > 0, "nhwc::native_batch_norm: expected an input with elements, got one of shape ",
              input.sym_sizes());
  TORCH_CHECK(have_numbers_of_channels(input, given),
              "nhwc::native_batch_norm: expected parameters and running statistics of ", input.sym_size(1),
              " elements");
  TORCH_CHECK(are_cast_with(input, given), "nhwc::native_batch_norm: expected parameters and running statistics of ",
              input.scalar_type(), ", or all of float for an input of half or bfloat16");
  TORCH_CHECK(is_given(running_mean) == is_given(running_var) && (training || is_given(running_mean)),
              "nhwc::native_batch_norm: expected both running statistics, or in training none");
}

at::ScalarType type_of_statistics(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

/// All rows of all samples as one sample, with a group for each channel.
cpu::GroupNormShape shape_of(const at::Tensor& input) {
  const int64_t channels = input.size(1);
  return {1, input.numel() / channels, channels, channels};
}

/// Returns what the backward needs of running statistics, in memory of its own: training may change them before.
std::tuple<at::Tensor, at::Tensor> given_statistics(const at::Tensor& input, const Optional& running_mean,
                                                    const Optional& running_var, double eps) {
  const at::ScalarType type = type_of_statistics(input);
  return {running_mean->detach().to(type, /*non_blocking=*/false, /*copy=*/true),
          (running_var->detach().to(at::kDouble) + eps).rsqrt().to(type)};
}

/// Updates a running statistic as PyTorch does, in double.
void update(const Optional& running, const at::Tensor& statistic, double momentum) {
  if (!is_given(running)) return;
  const at::Tensor values = statistic.to(at::kDouble);
  const double* from = values.const_data_ptr<double>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, running->scalar_type(), "nhwc::native_batch_norm", [&] {
    auto to = running->accessor<scalar_t, 1>();
    for (int64_t c = 0; c < to.size(0); ++c) {
      to[c] = static_cast<scalar_t>(momentum * from[c] + (1 - momentum) * static_cast<double>(to[c]));
    }
  });
}

// On other devices, for forward mode and for vmap, PyTorch's own operator runs.
Results stock_batch_norm(const at::Tensor& input, const Optional& running_mean, const Optional& running_var,
                         const Optional& weight, const Optional& bias, bool training, double momentum, double eps) {
  check(input, running_mean, running_var, weight, bias, training);
  const at::ScalarType type = type_of_statistics(input);
  auto [out, mean, rstd] =
      at::native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps);
  if (training) {
    mean = mean.detach().to(type), rstd = rstd.detach().to(type);
  } else {
    std::tie(mean, rstd) = given_statistics(input, running_mean, running_var, eps);
  }
  return {to_channels_last(out), mean, rstd};
}

Results batch_norm_cpu(const at::Tensor& input, const Optional& running_mean, const Optional& running_var,
                       const Optional& weight, const Optional& bias, bool training, double momentum, double eps) {
  if (!training) return stock_batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps);
  check(input, running_mean, running_var, weight, bias, training);
  const cpu::GroupNormShape shape = shape_of(input);
  const auto options = input.options().dtype(type_of_statistics(input));
  const at::Tensor dense = to_channels_last(input), out = empty_channels_last(input),
                   mean = at::empty({shape.channels}, options), rstd = at::empty({shape.channels}, options),
                   variance = at::empty({shape.channels}, options.dtype(at::kDouble));
  cpu::group_norm(shape, dense, value_of(weight), value_of(bias), eps, out, mean, rstd, variance);
  update(running_mean, mean, momentum);
  const auto rows = static_cast<double>(shape.rows);
  if (is_given(running_var)) update(running_var, variance.mul_(rows / (rows - 1)), momentum);  // the unbiased one
  return {out, mean, rstd};
}

Results batch_norm_meta(const at::Tensor& input, const Optional& running_mean, const Optional& running_var,
                        const Optional& weight, const Optional& bias, bool training, double, double) {
  check(input, running_mean, running_var, weight, bias, training);
  const auto options = input.options().dtype(type_of_statistics(input));
  const auto statistics = [&] { return at::empty_symint({input.sym_size(1)}, options); };
  return {empty_channels_last(input), statistics(), statistics()};
}

Results batch_norm_backward_cpu(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean,
                                const at::Tensor& rstd, const Optional& weight, bool training, double, Mask mask) {
  const cpu::GroupNormShape shape = shape_of(input);
  const at::Tensor dense = to_channels_last(input), dense_grad = to_channels_last(grad.to(input.scalar_type()));
  const at::ScalarType type = is_given(weight) ? weight->scalar_type() : input.scalar_type();
  const auto sums = [&](bool asked) {
    return asked ? at::empty({shape.channels}, input.options().dtype(at::kDouble)) : at::Tensor();
  };
  at::Tensor grad_input = mask[0] ? empty_channels_last(input) : at::Tensor();
  at::Tensor grad_weight = sums(mask[1]), grad_bias = sums(mask[2]);
  cpu::group_norm_backward(shape, dense_grad, dense, mean, rstd, value_of(weight), grad_input, grad_weight, grad_bias,
                           training);
  return {grad_input, mask[1] ? grad_weight.to(type) : grad_weight, mask[2] ? grad_bias.to(type) : grad_bias};
}

Results batch_norm_backward_meta(const at::Tensor&, const at::Tensor& input, const at::Tensor&, const at::Tensor&,
                                 const Optional& weight, bool, double, Mask mask) {
  const at::ScalarType type = is_given(weight) ? weight->scalar_type() : input.scalar_type();
  const auto parameter = [&](bool asked) {
    return asked ? at::empty_symint({input.sym_size(1)}, input.options().dtype(type)) : at::Tensor();
  };
  return {mask[0] ? empty_channels_last(input) : at::Tensor(), parameter(mask[1]), parameter(mask[2])};
}

/// Computes the gradients in PyTorch's differentiable functions, for derivatives of higher order, forward mode, vmap
/// and other devices. In training, the statistics are computed anew, since they depend on the input.
Results composed_batch_norm_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& mean,
                                     const at::Tensor& rstd, const Optional& weight, bool training, double eps,
                                     Mask mask) {
  const at::ScalarType type = type_of_statistics(input);
  std::vector<int64_t> others = {0};  // all dimensions but the channels
  for (int64_t dim = 2; dim < input.dim(); ++dim) others.push_back(dim);
  at::SymDimVector of_channels(input.dim(), 1);
  of_channels[1] = input.sym_size(1);
  const at::Tensor values = input.to(type), gradient = grad.to(type);
  at::Tensor center = mean.view_symint(of_channels), scale = rstd.view_symint(of_channels);
  if (training) {
    const auto [variance, average] = at::var_mean(values, others, /*correction=*/0, /*keepdim=*/true);
    center = average;
    scale = (variance + eps).rsqrt();
  }
  const at::Tensor normal = (values - center) * scale;
  Results results;
  if (mask[0]) {
    at::Tensor weighted = is_given(weight) ? gradient * weight->to(type).view_symint(of_channels) : gradient;
    const auto average = [&](const at::Tensor& of) { return of.mean(others, /*keepdim=*/true); };
    if (training) weighted = weighted - average(weighted) - normal * average(weighted * normal);
    std::get<0>(results) = to_channels_last((scale * weighted).to(input.scalar_type()));
  }
  const at::ScalarType of_parameters = is_given(weight) ? weight->scalar_type() : input.scalar_type();
  if (mask[1]) std::get<1>(results) = (gradient * normal).sum(others).to(of_parameters);
  if (mask[2]) std::get<2>(results) = gradient.sum(others).to(of_parameters);
  return results;
}

// The gradients are those of the input, the weight and the bias, whose dtype is the weight's.
const Formula batch_norm_formula = {
    "NhwcBatchNormBackward",
    [](const std::vector<at::Tensor>& gradients, const Formula::Context& context) -> std::vector<at::Tensor> {
      if (!gradients[0].defined()) return std::vector<at::Tensor>(3);
      const auto& saved = context.saved;
      const Optional weight = saved[3].defined() ? Optional(saved[3]) : Optional();
      auto [input, of_weight, of_bias] = native_batch_norm_backward().call(
          gradients[0], saved[0], saved[1], saved[2], weight, context.constants[0].toBool(),
          context.constants[1].toDouble(), {context.needed[0], context.needed[1], context.needed[2]});
      return {input, of_weight, of_bias};
    }};

Results batch_norm_autograd(c10::DispatchKeySet keys, const at::Tensor& input, const Optional& running_mean,
                            const Optional& running_var, const Optional& weight, const Optional& bias, bool training,
                            double momentum, double eps) {
  const std::array<at::Tensor, 3> inputs = {input, value_of(weight), value_of(bias)};
  if (has_tangent(inputs)) {
    return stock_batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps);
  }
  Results results;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    results = native_batch_norm().redispatch(keys & c10::after_autograd_keyset, input, running_mean, running_var,
                                             weight, bias, training, momentum, eps);
  }
  if (needs_gradient(inputs)) {
    const auto& [out, mean, rstd] = results;
    record(batch_norm_formula, out, {input, inputs[1], inputs[2]}, {input, mean, rstd, inputs[1]}, {training, eps});
  }
  return results;
}

Results batch_norm_backward_autograd(c10::DispatchKeySet keys, const at::Tensor& grad, const at::Tensor& input,
                                     const at::Tensor& mean, const at::Tensor& rstd, const Optional& weight,
                                     bool training, double eps, Mask mask) {
  const std::array<at::Tensor, 3> inputs = {grad, input, value_of(weight)};
  if (has_tangent(inputs) || needs_gradient(inputs)) {
    return composed_batch_norm_backward(grad, input, mean, rstd, weight, training, eps, mask);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return native_batch_norm_backward().redispatch(keys & c10::after_autograd_keyset, grad, input, mean, rstd, weight,
                                                 training, eps, mask);
}

at::Tensor batch_norm_of_any(const at::Tensor& input, const Optional& running_mean, const Optional& running_var,
                             const Optional& weight, const Optional& bias, bool training, double momentum, double eps) {
  if (!is_served(input, running_mean, running_var, weight, bias, training, eps)) {
    return at::batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps,
                          at::globalContext().userEnabledCuDNN());
  }
  return std::get<0>(native_batch_norm().call(input, running_mean, running_var, weight, bias, training, momentum, eps));
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CPU, m) {
  m.impl("native_batch_norm", TORCH_FN(batch_norm_cpu));
  m.impl("native_batch_norm_backward", TORCH_FN(batch_norm_backward_cpu));
}
TORCH_LIBRARY_IMPL(nhwc, CompositeExplicitAutograd, m) {
  m.impl("native_batch_norm", TORCH_FN(stock_batch_norm));
  m.impl("native_batch_norm_backward", TORCH_FN(composed_batch_norm_backward));
}
TORCH_LIBRARY_IMPL(nhwc, Meta, m) {
  m.impl("native_batch_norm", TORCH_FN(batch_norm_meta));
  m.impl("native_batch_norm_backward", TORCH_FN(batch_norm_backward_meta));
}
TORCH_LIBRARY_IMPL(nhwc, Autograd, m) {
  m.impl("native_batch_norm", TORCH_FN(batch_norm_autograd));
  m.impl("native_batch_norm_backward", TORCH_FN(batch_norm_backward_autograd));
}
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) {
  m.impl("native_batch_norm", TORCH_FN(stock_batch_norm));
  m.impl("native_batch_norm_backward", TORCH_FN(composed_batch_norm_backward));
  m.impl("batch_norm", TORCH_FN(batch_norm_of_any));
}
TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { m.impl("batch_norm", TORCH_FN(batch_norm_of_any)); }

}  // namespace nhwc
