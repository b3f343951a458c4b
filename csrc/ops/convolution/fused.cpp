// A convolution, the batch norm and the activation after it as one, where nothing is derived: the norm scales the
// weight and shifts the bias, and oneDNN adds a residual and activates what it has in registers.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <string_view>
#include <tuple>
#include <utility>

#include "cpu/pages.h"
#include "layout/channels_last.h"
#include "ops/autograd_node.h"
#include "ops/composition.h"
#include "ops/convolution/passes.h"
#include "ops/norm.h"
#include "ops/waiting.h"
#include "torch_nhwc/ops.h"

namespace nhwc {
namespace {

using Ints = at::IntArrayRef;
using cpu::ActivationKind;

Call call_of(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, Ints stride, Ints padding,
             Ints dilation, int64_t groups) {
  const auto own = [](Ints sizes) { return at::SymDimVector(sizes.begin(), sizes.end()); };
  return {input, weight, bias, own(stride), own(padding), own(dilation), groups, at::SymDimVector(stride.size(), 0)};
}

bool has_default_precision() {
  return !at::globalContext().deterministicMkldnn() &&
         onednn_precision(at::Float32Op::CONV) == at::Float32Precision::IEEE;
}

/// Returns whether a convolution is of channels-last floats on a CPU, and nobody observes or derives it.
bool is_plain(const Call& call) {
  const at::Tensor& bias = value_of(call.bias);
  return call.is_on_cpu() && call.input.scalar_type() == at::kFloat && call.has_one_dtype() &&
         static_cast<size_t>(call.input.dim()) == call.axes() + 2 && call.is_accepted() &&
         is_unobserved({call.input, call.weight, bias}) && call.has_channels_last_input() &&
         !needs_gradient({call.input, call.weight, bias});
}

/// Returns whether our kernels compute the result as it is.
bool is_by_kernels(const Choice& choice) { return choice.kernels.forward && !choice.way->rewrite; }

/// Returns whether it is a product of matrices; of 2D oneDNN has what follows in its last step.
bool is_by_products(const Call& call, const Choice& choice) {
  return call.axes() == 3 && choice.others == Others::products && !choice.kernels.forward;
}

/// Returns whether a convolution that is PyTorch's, or our kernels', may wait: where the passes that are saved take
/// longer than one over the weight, which a norm scales in each call, and than the wait. The evidence is a grid of the
/// layers of four networks with a norm and ReLU or SiLU after them (Zen 4, as it is and held to AVX2): oneDNN takes at
/// most 1.05 times as long as both ways of PyTorch's, with SiLU below AVX-512 1.15 times, and mostly 0.4 to 0.9.
bool can_wait(const Call& call) {
  if (records_inputs() || !is_plain(call) || !has_default_precision()) return false;
  for (const at::Tensor* each : {&call.input, &call.weight, &value_of(call.bias)}) {
    if (each->defined() && each->is_inference()) return false;  // which has no version
  }
  const int64_t results = c10::multiply_integers(C10_AS_INTARRAYREF_SLOW(kernels::output_sizes(call)));
  if (results < std::max<int64_t>(1 << 18, 2 * call.weight.numel())) return false;
  const Choice choice = choose(call);
  return is_by_kernels(choice) || std::string_view(choice.way->name) == "pytorch" || choice.others == Others::products;
}

/// Returns a convolution's result that waits, or nothing where it is to be computed at once.
at::Tensor convolution_waiting(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                               Ints stride, Ints padding, Ints dilation, int64_t groups) {
  const Call call = call_of(input, weight, bias, stride, padding, dilation, groups);
  if (!can_wait(call)) return {};
  return waiting_tensor(C10_AS_INTARRAYREF_SLOW(kernels::output_sizes(call)), at::kFloat, at::kCPU);
}

/// A batch norm by running statistics; undefined where there is none.
struct BatchNorm {
  const at::Tensor &mean, &variance, &weight, &bias;
  double eps;

  /// Returns whether all are a float for each channel.
  bool is_plain(int64_t channels) const {
    const auto fits = [&](const at::Tensor& each) {
      return each.is_cpu() && each.scalar_type() == at::kFloat && each.is_contiguous() && each.numel() == channels;
    };
    return fits(mean) && fits(variance) && (!weight.defined() || fits(weight)) && (!bias.defined() || fits(bias));
  }

  /// Returns the call of the convolution with both, in new memory, and whether all numbers of it are finite.
  std::pair<Call, bool> folded_into(const Call& call) const;
};

bool is_finite(float number) { return std::abs(number) <= std::numeric_limits<float>::max(); }

std::pair<Call, bool> BatchNorm::folded_into(const Call& call) const {
  const int64_t outputs = call.weight.size(0), terms = call.weight.numel() / outputs;
  const at::Tensor dense = to_channels_last(call.weight);
  Call folded = call;
  folded.weight = empty_channels_last(call.weight);
  folded.bias = at::empty({outputs}, call.weight.options());
  const auto pointer = [](const at::Tensor& each) { return each.defined() ? each.const_data_ptr<float>() : nullptr; };
  const float *from = pointer(dense), *means = pointer(mean), *variances = pointer(variance);
  const float *factors = pointer(weight), *shifts = pointer(bias), *biases = pointer(value_of(call.bias));
  auto *to = folded.weight.mutable_data_ptr<float>(), *bias_to = folded.bias->mutable_data_ptr<float>();
  std::atomic<bool> are_finite = true;
  at::parallel_for(0, outputs, at::divup(at::internal::GRAIN_SIZE, terms), [&](int64_t begin, int64_t end) {
    int others = 0;
    for (int64_t output = begin; output < end; ++output) {
      const double scale = (factors ? factors[output] : 1.) / std::sqrt(variances[output] + eps);
      const double centred = (biases ? biases[output] : 0.) - means[output];
      bias_to[output] = static_cast<float>(centred * scale + (shifts ? shifts[output] : 0.));
      others |= static_cast<int>(!is_finite(bias_to[output]));
      const auto factor = static_cast<float>(scale);
      for (int64_t at = output * terms; at < (output + 1) * terms; ++at) {
        to[at] = from[at] * factor;
        others |= static_cast<int>(!is_finite(to[at]));
      }
    }
    if (others) are_finite = false;
  });
  return {folded, are_finite};
}

/// oneDNN's result of a convolution, with what follows.
at::Tensor by_onednn(const Call& call, const at::Tensor& residual, const cpu::Activation& activation) {
  using Scalars = c10::List<std::optional<at::Scalar>>;
  using Text = std::optional<std::string_view>;
  using Fused = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, Ints, Ints, Ints, int64_t,
                           std::string_view, Scalars, Text);
  using Sum = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&, Ints, Ints,
                         Ints, int64_t, std::string_view, std::optional<at::Scalar>, Text, Scalars, Text);
  constexpr const char* name = "mkldnn::_convolution_pointwise";
  static const auto fused = ops_detail::find<Fused>(name);
  static const auto sum = c10::Dispatcher::singleton().findSchemaOrThrow(name, "binary").typed<Sum>();
  const auto ints = [](const at::SymDimVector& sizes) { return C10_AS_INTARRAYREF_SLOW(sizes); };
  const int64_t groups = call.groups.expect_int();
  const bool is_rectified = activation.kind == ActivationKind::relu && std::isinf(activation.parameter);
  if (residual.defined()) {
    const at::Tensor out = sum.call(call.input, residual, call.weight, call.bias, ints(call.padding), ints(call.stride),
                                    ints(call.dilation), groups, "add", std::nullopt,
                                    is_rectified ? Text("relu") : Text(), Scalars(), Text());
    return is_rectified ? out : activated(out, activation);
  }
  const auto by = [&](std::string_view kind, std::initializer_list<double> numbers = {}, Text algorithm = "") {
    Scalars scalars;
    for (const double number : numbers) scalars.push_back(at::Scalar(number));
    return fused.call(call.input, call.weight, call.bias, ints(call.padding), ints(call.stride), ints(call.dilation),
                      groups, kind, scalars, algorithm);
  };
  switch (activation.kind) {
    case ActivationKind::relu: return is_rectified ? by("relu") : by("hardtanh", {0, activation.parameter});
    case ActivationKind::leaky_relu: return by("leaky_relu", {activation.parameter});
    case ActivationKind::silu: return by("swish");
    case ActivationKind::gelu: return by("gelu", {}, "none");
    case ActivationKind::gelu_tanh: return by("gelu", {}, "tanh");
    default: return by("none");
  }
}

/// Returns whether all numbers are finite, or undefined. A sum that overflows says no, too.
bool are_all_finite(const at::Tensor& tensor) { return !tensor.defined() || is_finite(at::sum(tensor).item<float>()); }

/// Returns activation(norm(convolution) + residual), and whether its numbers are finite, as far as they were looked at.
///
/// oneDNN rectifies what is not a number to zero, which PyTorch keeps. So nothing that it reads may be other than
/// finite; `is_finite` says so of input and residual. Sums of finite numbers that overflow are not looked at.
std::tuple<at::Tensor, bool> convolution_activation(const at::Tensor& input, const at::Tensor& weight,
                                                    const OptionalTensor& bias, const OptionalTensor& mean,
                                                    const OptionalTensor& variance, const OptionalTensor& norm_weight,
                                                    const OptionalTensor& norm_bias, const OptionalTensor& residual,
                                                    Ints stride, Ints padding, Ints dilation, int64_t groups,
                                                    double eps, bool is_finite, c10::string_view name,
                                                    double parameter) {
  const cpu::HugePages requested;
  const WithVersions with_versions;
  const at::AutoDispatchBelowADInplaceOrView below;
  const c10::impl::ExcludeDispatchKeyGuard in_float32(c10::autocast_dispatch_keyset);
  const cpu::Activation activation = activation_of("nhwc::convolution_activation", name, parameter);
  const Call call = call_of(input, weight, bias, stride, padding, dilation, groups);
  const at::Tensor other = residual ? to_channels_last(*residual) : at::Tensor();
  TORCH_CHECK(
      is_plain(call) && (!mean || variance),
      "nhwc::convolution_activation: expected channels-last floats on a CPU whose sizes fit, without a gradient, "
      "and both statistics or none");
  TORCH_CHECK(!other.defined() || (other.sym_sizes() == at::SymIntArrayRef(kernels::output_sizes(call)) &&
                                   other.is_cpu() && other.scalar_type() == at::kFloat),
              "nhwc::convolution_activation: expected a residual of the result's sizes and dtype, got ",
              other.sym_sizes(), " of ", other.scalar_type());
  if (!mean && !other.defined() && activation.kind == ActivationKind::none) return {convolution(call), false};
  const BatchNorm norm{value_of(mean), value_of(variance), value_of(norm_weight), value_of(norm_bias), eps};
  const Choice choice = choose(call);
  const bool is_product = is_by_products(call, choice), is_ours = is_product || is_by_kernels(choice);
  const bool hides = !is_ours && activation.kind == ActivationKind::relu;
  const bool is_read_finite = !hides || is_finite || (are_all_finite(input) && are_all_finite(other));
  if (is_read_finite && (!mean || norm.is_plain(weight.size(0)))) {
    const auto [folded, is_weight_finite] =
        mean ? norm.folded_into(call)
             : std::pair{call, !hides || (are_all_finite(weight) && are_all_finite(value_of(bias)))};
    const auto compute = is_product ? by_products : kernels::forward;
    if (is_ours) return {compute(folded, {other, activation}), is_finite && mean && is_weight_finite};
    if (!hides || is_weight_finite) return {by_onednn(folded, other, activation), hides};
  }
  at::Tensor out = convolution(call);
  if (mean) out = at::batch_norm(out, norm_weight, norm_bias, mean, variance, false, 0, eps, false);
  return {activated(other.defined() ? out + other : out, activation), false};
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) {
  m.impl("convolution_waiting", TORCH_FN(convolution_waiting));
  m.impl("convolution_activation", TORCH_FN(convolution_activation));
}

}  // namespace nhwc
