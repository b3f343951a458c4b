// Norms in two steps: the statistics, and the pass that normalises, in which a residual and an activation are computed
// as well. Between the steps a result may wait, as a tensor without memory.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

#include "cpu/group_norm.h"
#include "cpu/pages.h"
#include "layout/channels_last.h"
#include "ops/autograd_node.h"
#include "ops/composition.h"
#include "ops/norm.h"
#include "ops/waiting.h"
#include "torch_nhwc/ops.h"

namespace nhwc {
namespace {

using cpu::ActivationKind;

/// A norm whose statistics are known: `[samples, groups]` of double, or `[channels]`. No groups are batch norm.
struct Known {
  const at::Tensor &input, &mean, &rstd;
  Optional scale, shift;
  int64_t groups;
  bool training;
  double eps;
  bool is_float;                       // the result is, as under autocast on a GPU
  Optional input_bias = std::nullopt;  // a number for each channel, added to the input first

  const at::Tensor& weight() const { return value_of(scale); }
  const at::Tensor& bias() const { return value_of(shift); }

  /// Refers to this. What the statistics are of makes no difference to the forward.
  Norm norm() const {
    return Norm("nhwc::norm_activation", input, scale, shift, none, none, /*is_batch_norm=*/groups == 0, groups,
                /*is_of_input=*/true, eps);
  }
  bool is_of_input() const { return groups > 0 || training; }
  /// Returns whether a bias makes no difference, since it is a part of the mean that is subtracted.
  bool is_invariant() const { return is_of_input() && (groups == 0 || groups == input.size(1)); }
  /// Calls `use` with the same norm of an input that has its bias. Beside a bias there are statistics of each channel,
  /// and the mean is without it.
  template <typename Use>
  auto with_biased(const Use& use) const {
    const auto of_groups = [&](const at::Tensor& of_channels) {
      if (groups == 0) return of_channels;
      return of_channels.view({of_channels.size(0), groups, -1}).select(2, 0).contiguous();
    };
    const at::Tensor biased = with_bias(input, *input_bias),
                     its_mean = of_groups(mean + input_bias->detach().to(at::kDouble)), its_rstd = of_groups(rstd);
    return use(Known{biased, its_mean, its_rstd, scale, shift, groups, training, eps, is_float});
  }
  at::ScalarType type_of_result() const { return is_float ? at::kFloat : input.scalar_type(); }
  /// Returns the norm for the kernels of a GPU, or nothing.
  std::optional<cuda::GroupNorm> find_cuda() const {
    if (!input.is_cuda()) return std::nullopt;
    auto found = find_cuda_norm(norm(), 0, is_float, value_of(input_bias));
    if (found) found->is_of_input = is_of_input();
    return found;
  }
  void check() const {
    const Norm call = norm();
    call.check();
    at::SymDimVector statistics = call.sizes_of_statistics();
    if (input_bias) {
      TORCH_CHECK(input_bias->dim() == 1 && input_bias->sym_size(0) == input.sym_size(1), call.name,
                  ": expected a bias of a number for each channel of the input, got one of shape ",
                  input_bias->sym_sizes());
      statistics.back() = input.sym_size(1);
    }
    const c10::SymIntArrayRef sizes = statistics;
    for (const at::Tensor* each : {&mean, &rstd}) {
      TORCH_CHECK(each->sym_sizes() == sizes && each->scalar_type() == at::kDouble && each->is_contiguous(), call.name,
                  ": expected dense statistics of double and of shape ", sizes, ", got ", each->scalar_type(), " and ",
                  each->sym_sizes());
    }
  }
};

// --- In PyTorch's differentiable operators ---

/// Returns the norm alone. Statistics of the input are computed again, as part of what is differentiated.
at::Tensor norm_alone(const Known& known) {
  const auto& [input, mean, rstd, scale, shift, groups, training, eps, is_float, _] = known;
  if (is_float) {
    const auto cast = [](const Optional& each) { return each ? Optional(each->to(at::kFloat)) : std::nullopt; };
    return at::group_norm(input.to(at::kFloat), groups, cast(scale), cast(shift), eps);
  }
  if (groups > 0) return at::group_norm(input, groups, scale, shift, eps);
  if (training) return at::batch_norm(input, scale, shift, none, none, true, 0, eps, /*cudnn_enabled=*/false);
  const at::Tensor rows = (channels_to_end(input).to(at::kDouble) - mean) * rstd;
  const at::Tensor scaled = scale ? rows * *scale : rows;
  return channels_from_end((shift ? scaled + *shift : scaled).to(input.scalar_type()));
}

// --- Backward ---

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// Returns the gradients of input, weight and bias from the one before the activation, by the operators of norms,
/// which have derivatives of every order.
Gradients norm_backward(const Known& known, const at::Tensor& grad, const std::vector<bool>& needed) {
  static const auto of_groups =
      ops_detail::find<Gradients(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const Optional&, int64_t, double, std::array<bool, 3>)>(
          "nhwc::native_group_norm_backward");
  static const auto of_batch =
      ops_detail::find<Gradients(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const Optional&, bool, double, std::array<bool, 3>)>(
          "nhwc::native_batch_norm_backward");
  if (known.is_float) {
    const at::Tensor input = known.input.to(at::kFloat);
    const Optional scale = known.scale ? Optional(known.scale->to(at::kFloat)) : std::nullopt;
    auto [of_input, of_scale, of_shift] = norm_backward(
        {input, known.mean, known.rstd, scale, known.shift, known.groups, known.training, known.eps, false}, grad,
        needed);
    if (of_scale.defined()) of_scale = of_scale.to(known.weight().scalar_type());
    return {of_input.defined() ? of_input.to(known.input.scalar_type()) : of_input, of_scale, of_shift};
  }
  const at::ScalarType type = known.norm().type_of_statistics();
  const at::Tensor mean = known.mean.to(type), rstd = known.rstd.to(type);
  const std::array<bool, 3> mask = {needed[0], needed[1], needed[2]};
  auto gradients = known.groups > 0
                       ? of_groups.call(grad, known.input, mean, rstd, known.scale, known.groups, known.eps, mask)
                       : of_batch.call(grad, known.input, mean, rstd, known.scale, known.training, known.eps, mask);
  // They give both parameters the dtype of the weight.
  if (known.shift && std::get<2>(gradients).defined()) {
    std::get<2>(gradients) = std::get<2>(gradients).to(known.bias().scalar_type());
  }
  return gradients;
}

/// As sums, which are doubles on a CPU, the gradients of the parameters are there even if there are none of these.
Gradients norm_backward_by_kernels(const Known& known, const at::Tensor& grad, const cpu::Activation& activation,
                                   const std::vector<bool>& needed, bool are_sums) {
  const at::Tensor input = to_channels_last(known.input);
  const auto type_of_sums = input.is_cuda() ? known.norm().type_of_statistics() : at::kDouble;
  const auto of_parameter = [&](const at::Tensor& parameter, bool is_needed) {
    if (are_sums) return at::empty({input.size(1)}, input.options().dtype(type_of_sums));
    return is_needed ? at::empty_like(parameter) : at::Tensor();
  };
  const at::Tensor grad_input = needed[0] ? empty_channels_last(input) : at::Tensor(),
                   grad_weight = of_parameter(known.weight(), needed[1]),
                   grad_bias = of_parameter(known.bias(), needed[2]);
  if (const auto on_device = known.find_cuda()) {
    cuda::group_norm_backward(*on_device, to_channels_last(grad), known.mean, known.rstd, grad_input, grad_weight,
                              grad_bias, activation);
  } else {
    cpu::group_norm_backward(known.norm().shape(), to_channels_last(grad), input, known.mean, known.rstd,
                             known.weight(), grad_input, grad_weight, grad_bias, known.is_of_input(), known.bias(),
                             activation);
  }
  return {grad_input, grad_weight, grad_bias};
}

/// Returns the sums of grad * y for each channel, where y is the norm and negative, of a channels-last gradient.
/// `of_weight` and `of_bias` are those of the norm's parameters by its slopes; with slopes that are smaller by 1, they
/// differ by these elements.
at::Tensor gradients_of_slopes(const Known& known, const at::Tensor& grad, const cpu::Activation& activation,
                               const at::Tensor& of_weight, const at::Tensor& of_bias) {
  const cpu::Activation other = {activation.kind, activation.parameter - 1, activation.slopes};
  const auto [_, other_weight, other_bias] =
      norm_backward_by_kernels(known, grad, other, {false, false, false}, /*are_sums=*/true);
  at::Tensor by_weight = of_weight - other_weight, by_bias = of_bias - other_bias;
  if (known.scale) by_weight = by_weight * *known.scale;
  return known.shift ? by_weight + by_bias * *known.shift : by_weight;
}

/// Saved are input, mean, rstd, weight, bias, the slopes, the input's bias and, if there is a residual under an
/// activation, the output.
std::vector<at::Tensor> all_gradients(const std::vector<at::Tensor>& gradients, const Formula::Context& context) {
  const auto& [saved, constants, needed] = context;
  at::Tensor grad = gradients[0];
  if (!grad.defined()) return std::vector<at::Tensor>(6);
  const Known known{saved[0],
                    saved[1],
                    saved[2],
                    optional_of(saved[3]),
                    optional_of(saved[4]),
                    constants[0].toInt(),
                    constants[1].toBool(),
                    constants[2].toDouble(),
                    constants[6].toBool(),
                    optional_of(saved[6])};
  const at::Tensor& slopes = saved[5];
  // What is left out of a mean has a gradient of zeros rather than none: optimizers decay it, other processes expect
  // it.
  const bool has_sum = needed[5] && !known.is_invariant();
  std::vector<bool> of_norm(needed.begin(), needed.begin() + 3);
  of_norm[0] = needed[0] || has_sum;
  const auto of_input_bias = [&](const at::Tensor& of_input) {
    if (!needed[5]) return at::Tensor();
    if (!has_sum) return at::zeros_like(*known.input_bias);
    return channels_to_end(of_input).flatten(0, -2).sum(0).to(known.input_bias->scalar_type());
  };
  cpu::Activation activation{static_cast<ActivationKind>(constants[3].toInt()), constants[4].toDouble(), slopes};
  at::Tensor of_residual;
  if (saved.size() > 7) grad = gradient_before(grad, saved[7], activation);
  if (constants[5].toBool()) activation = {}, of_residual = needed[3] ? grad : at::Tensor();
  at::Tensor of_slopes;
  if (at::GradMode::is_enabled() || (known.input_bias && !known.input.is_cuda()) ||
      !is_unobserved({grad, known.input, known.weight(), known.bias(), slopes, saved[6]})) {
    const auto composed = [&](const Known& norm) -> std::vector<at::Tensor> {
      if (activation.kind != ActivationKind::none) {
        const at::Tensor y = norm_alone(norm);
        if (slopes.defined()) {
          const at::Tensor beside = beside_channels(slopes, y);
          if (needed[4]) of_slopes = at::where(y > 0, 0, grad * y).sum_to_size(beside.sizes()).reshape_as(slopes);
          grad = at::where(y > 0, grad, grad * beside);
        } else {
          grad = gradient_before(grad, y, activation);
        }
      }
      auto [input, weight, bias] = norm_backward(norm, grad, of_norm);
      return {input, weight, bias, of_residual, of_slopes, of_input_bias(input)};
    };
    return known.input_bias ? known.with_biased(composed) : composed(known);
  }
  const bool has_slopes = slopes.defined() && needed[4];
  if (has_slopes) grad = to_channels_last(grad);  // which two passes read
  auto [input, weight, bias] = norm_backward_by_kernels(known, grad, activation, of_norm, has_slopes);
  if (has_slopes) {
    of_slopes = gradients_of_slopes(known, grad, activation, weight, bias);
    if (slopes.numel() == 1) of_slopes = of_slopes.sum();
    of_slopes = of_slopes.to(slopes.scalar_type()).reshape_as(slopes);
    weight = needed[1] ? weight.to(known.weight().scalar_type()) : at::Tensor();
    bias = needed[2] ? bias.to(known.bias().scalar_type()) : at::Tensor();
  }
  return {input, weight, bias, of_residual, of_slopes, of_input_bias(input)};
}

const Formula norm_activation_formula = {"NhwcNormActivationBackward", all_gradients};

/// Makes an output differentiable, if a gradient is needed.
void record_if_needed(const Known& known, const at::Tensor& residual, const cpu::Activation& activation,
                      const at::Tensor& output) {
  const at::Tensor& input_bias = value_of(known.input_bias);
  const std::array<at::Tensor, 6> inputs = {known.input, known.weight(),    known.bias(),
                                            residual,    activation.slopes, input_bias};
  if (!needs_gradient(inputs)) return;
  // Of instance norm PyTorch copies what the backward reads: the parameters may change before it. The input's bias is a
  // copy already.
  const bool is_instance_norm = known.groups == known.input.size(1);
  const auto kept = [&](const at::Tensor& each) { return is_instance_norm && each.defined() ? each.clone() : each; };
  const bool saves_output = residual.defined() && activation.kind != ActivationKind::none;
  record(norm_activation_formula, output, inputs,
         {known.input, known.mean, known.rstd, kept(known.weight()), kept(known.bias()), activation.slopes, input_bias},
         {known.groups, known.training, known.eps, static_cast<int64_t>(activation.kind), activation.parameter,
          residual.defined(), known.is_float},
         saves_output);
}

// --- The operators ---

/// Returns whether a residual, if there is one, can be added to the result of an input.
bool can_add(const at::Tensor& residual, const at::Tensor& input, at::ScalarType type_of_result) {
  return !residual.defined() || (residual.sym_sizes() == input.sym_sizes() &&
                                 residual.scalar_type() == type_of_result && residual.device() == input.device());
}

/// Returns whether the kernels compute it, with its derivative: that of a residual reads the output, which tells the
/// input of the activation only if that is monotonic. That of slopes is without a residual.
bool has_kernels(const Known& known, const std::optional<cuda::GroupNorm>& on_device, const at::Tensor& residual,
                 const cpu::Activation& activation) {
  const Norm norm = known.norm();
  const bool is_monotonic =
      activation.kind <= ActivationKind::relu ||
      (activation.kind == ActivationKind::leaky_relu && !activation.slopes.defined() && activation.parameter > 0);
  const bool has_device =
      norm.is_on_cpu() ? !known.is_float && cpu::has_activation(norm.type(), activation.kind) : on_device.has_value();
  return norm.is_served() && has_device && can_add(residual, known.input, known.type_of_result()) &&
         is_unobserved(
             {known.input, known.weight(), known.bias(), residual, activation.slopes, value_of(known.input_bias)}) &&
         known.input.numel() > 0 &&
         (!residual.defined() || is_monotonic ||
          !needs_gradient(
              {known.input, known.weight(), known.bias(), residual, activation.slopes, value_of(known.input_bias)}));
}

at::Tensor norm_activation(const at::Tensor& input, const at::Tensor& mean, const at::Tensor& rstd,
                           const Optional& weight, const Optional& bias, const Optional& residual, int64_t groups,
                           bool training, double eps, bool is_float, c10::string_view name, double parameter,
                           const Optional& slopes, const Optional& input_bias) {
  const cpu::HugePages requested;
  const WithVersions with_versions;
  const Known known{input, mean, rstd, weight, bias, groups, training, eps, is_float, input_bias};
  const at::Tensor& other = value_of(residual);
  cpu::Activation activation = activation_of("nhwc::norm_activation", name, parameter);
  known.check();
  if (slopes) {
    activation.slopes = *slopes;
    TORCH_CHECK(activation.kind == ActivationKind::leaky_relu && slopes->device() == input.device() &&
                    slopes->is_floating_point() &&
                    (slopes->sym_numel() == 1 || slopes->sym_numel() == input.sym_size(1)),
                "nhwc::norm_activation: expected leaky_relu and one slope, or one for each channel, on ",
                input.device(), ", got ", name, " and ", slopes->sym_sizes(), " on ", slopes->device());
  }
  const auto on_device = known.find_cuda();
  if (input_bias && !(on_device && has_kernels(known, on_device, other, activation))) {
    return known.with_biased([&](const Known& biased) {
      return norm_activation(biased.input, biased.mean, biased.rstd, weight, bias, residual, groups, training, eps,
                             is_float, name, parameter, slopes, none);
    });
  }
  if (!has_kernels(known, on_device, other, activation)) {
    const at::Tensor alone = norm_alone(known), sum = other.defined() ? alone + other : alone;
    return slopes ? at::prelu(sum, *slopes) : activated(sum, activation);
  }
  at::Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor dense = to_channels_last(input);
    const at::Tensor added = other.defined() ? to_channels_last(other) : other;
    if (on_device) {
      out = empty_channels_last(input, known.type_of_result());
      cuda::normalise(*on_device, mean, rstd, added, activation, out);
    } else {
      out = empty_channels_last(input);
      cpu::normalise(known.norm().shape(), dense, mean, rstd, known.weight(), known.bias(), added, activation, out);
    }
  }
  record_if_needed(known, other, activation, out);
  return out;
}

/// Returns mean, rstd and a result that waits, or nothing where a norm is not computed in two steps: what PyTorch
/// refuses, and what our kernels do not serve.
std::tuple<at::Tensor, at::Tensor, at::Tensor> norm_waiting(const at::Tensor& input, const Optional& running_mean,
                                                            const Optional& running_var, const Optional& weight,
                                                            const Optional& bias, int64_t groups, bool training,
                                                            double momentum, double eps, bool is_float,
                                                            const Optional& input_bias) {
  if (input_bias && !input.is_cuda()) {  // where no kernel takes a bias
    auto [mean, rstd, waiting] = norm_waiting(with_bias(input, *input_bias), running_mean, running_var, weight, bias,
                                              groups, training, momentum, eps, is_float, none);
    if (!waiting.defined()) return {};
    if (groups > 0) {
      const int64_t repeats = input.size(1) / groups;
      mean = mean.repeat_interleave(repeats, 1), rstd = rstd.repeat_interleave(repeats, 1);
    }
    mean = mean - input_bias->detach().to(at::kDouble);
    waiting = waiting_tensor(input.sizes(), input.scalar_type(), input.device());
    record_if_needed({input, mean, rstd, weight, bias, groups, training, eps, is_float, input_bias}, {}, {}, waiting);
    return {mean, rstd, waiting};
  }
  const Norm norm = groups == 0 ? batch_norm_of(input, running_mean, running_var, weight, bias, training, eps)
                                : group_norm_of(input, groups, weight, bias, eps);
  const bool is_served = (input.dim() == 4 || input.dim() == 5) && eps > 0 && norm.is_served() &&
                         is_unobserved({input, norm.weight, norm.bias, value_of(input_bias)}) && !records_inputs() &&
                         input.numel() > 0;
  if (!is_served || (is_float && (groups == 0 || !input.is_cuda()))) return {};
  const auto on_device =
      input.is_cuda() ? find_cuda_norm(norm, momentum, is_float, value_of(input_bias)) : std::nullopt;
  if (!on_device && !input.is_cpu()) return {};
  const cpu::GroupNormShape shape = norm.shape();
  if (norm.is_of_input && shape.rows * (shape.channels / shape.groups) < 2) return {};
  at::Tensor mean, rstd;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto options = input.options().dtype(at::kDouble);
    const at::DimVector sizes = groups == 0 ? at::DimVector{shape.channels}
                                            : at::DimVector{shape.samples, input_bias ? shape.channels : groups};
    mean = at::empty(sizes, options), rstd = at::empty(sizes, options);
    if (on_device) {
      cuda::norm_statistics(*on_device, mean, rstd);
    } else if (norm.is_of_input) {
      const at::Tensor variance = norm.running_var.defined() ? at::empty(sizes, options) : at::Tensor();
      cpu::norm_statistics(shape, to_channels_last(input), eps, mean, rstd, variance);
      if (norm.running_mean.defined()) {
        update(norm.running_mean, mean, momentum);
        update(norm.running_var, variance, momentum, unbiasing(shape.rows));
      }
    } else {
      cpu::statistics_of(norm.running_mean, norm.running_var, eps, mean, rstd);
    }
  }
  const Known known{input, mean, rstd, weight, bias, groups, training, eps, is_float, input_bias};
  const at::Tensor waiting = waiting_tensor(input.sizes(), known.type_of_result(), input.device());
  record_if_needed(known, {}, {}, waiting);
  return {mean, rstd, waiting};
}

/// Adds a residual to a result that waits: the sum waits as well.
at::Tensor norm_waiting_sum(const at::Tensor& input, const at::Tensor& mean, const at::Tensor& rstd,
                            const Optional& weight, const Optional& bias, const at::Tensor& residual, int64_t groups,
                            bool training, double eps, bool is_float, const Optional& input_bias) {
  const Known known{input, mean, rstd, weight, bias, groups, training, eps, is_float, input_bias};
  if (input_bias && !input.is_cuda()) {
    return known.with_biased([&](const Known& biased) {
      return norm_waiting_sum(biased.input, biased.mean, biased.rstd, weight, bias, residual, groups, training, eps,
                              is_float, none);
    });
  }
  if (!has_kernels(known, known.find_cuda(), residual, {}) || !is_channels_last(residual)) return {};
  const at::Tensor waiting = waiting_tensor(input.sizes(), known.type_of_result(), input.device());
  record_if_needed(known, residual, {}, waiting);
  return waiting;
}

/// Returns activation(input + bias + residual), where nothing is derived in the pass that normalises. A bias has an
/// element for each channel.
at::Tensor bias_activation(const at::Tensor& input, const at::Tensor& bias, const Optional& residual,
                           c10::string_view name, double parameter, const Optional& slopes) {
  const WithVersions with_versions;
  cpu::Activation activation = activation_of("nhwc::bias_activation", name, parameter);
  TORCH_CHECK(input.dim() > 1 && bias.dim() == 1 && bias.sym_size(0) == input.sym_size(1),
              "nhwc::bias_activation: expected a number for each channel of an input of shape ", input.sym_sizes(),
              ", got ", bias.sym_sizes());
  activation.slopes = value_of(slopes);
  const std::array<at::Tensor, 4> tensors = {input, bias, value_of(residual), activation.slopes};
  // As batch norm by a mean of 0 and a deviation of 1.
  const Optional shift = bias;
  const Norm norm("nhwc::bias_activation", input, none, shift, none, none, /*is_batch_norm=*/true, 0, true, 1);
  if (input.dim() > 3 && norm.is_served() && is_unobserved(tensors) && !needs_gradient(tensors) && input.numel() > 0 &&
      can_add(value_of(residual), input, norm.type())) {
    const cpu::GroupNormShape shape = norm.shape();
    const at::Tensor dense = to_channels_last(input), summands = bias.contiguous();
    const cuda::GroupNorm on_device{
        shape.samples, shape.rows,        shape.groups,     dense, norm.type(), norm.weight,
        summands,      norm.running_mean, norm.running_var, 0,     0,           /*is_of_input=*/false};
    const bool is_on_device =
        input.is_cuda() &&
        cuda::runs_norm(input.device(), cuda::NormKind::instance, static_cast<int64_t>(input.nbytes())) &&
        cuda::can_run(on_device);
    if (is_on_device || (input.is_cpu() && cpu::has_activation(norm.type(), activation.kind))) {
      const at::AutoDispatchBelowADInplaceOrView below;
      const auto options = input.options().dtype(at::kDouble);
      const at::Tensor added = residual ? to_channels_last(*residual) : at::Tensor(), out = empty_channels_last(input);
      at::Tensor mean, rstd;
      if (is_on_device) {
        mean = at::empty({shape.channels}, options), rstd = at::empty({shape.channels}, options);
        cuda::norm_statistics(on_device, mean, rstd);  // without running ones, those of a norm that changes nothing
        cuda::normalise(on_device, mean, rstd, added, activation, out);
      } else {
        mean = at::zeros({shape.channels}, options), rstd = at::ones({shape.channels}, options);
        cpu::normalise(shape, dense, mean, rstd, {}, summands, added, activation, out);
      }
      return out;
    }
  }
  const at::Tensor biased = with_bias(input, bias), sum = residual ? biased + *residual : biased;
  return slopes ? at::prelu(sum, *slopes) : activated(sum, activation);
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) {
  m.impl("norm_activation", TORCH_FN(norm_activation));
  m.impl("bias_activation", TORCH_FN(bias_activation));
  m.impl("norm_waiting", TORCH_FN(norm_waiting));
  m.impl("norm_waiting_sum", TORCH_FN(norm_waiting_sum));
}

}  // namespace nhwc
