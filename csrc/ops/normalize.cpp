// Normalisation by the length of a pixel's channels, and what follows it: an RMS norm over the channels.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <vector>

#include "cpu/pages.h"
#include "cpu/rms.h"
#include "cuda/rms.h"
#include "layout/channels_last.h"
#include "ops/autograd_node.h"
#include "ops/composition.h"
#include "ops/norm.h"
#include "ops/waiting.h"

namespace nhwc {
namespace {

/// activation(input / max(length, eps) * scale * weight + bias), of which weight and bias are undefined or
/// `[channels]`.
struct Call {
  at::Tensor input, weight, bias;
  double scale, eps;
  bool has_silu;
  at::Tensor input_bias = {};  // added to the input first

  Call(const at::Tensor& input, const Optional& weight, const Optional& bias, double scale, double eps,
       c10::string_view activation)
      : input(input), weight(of_channels(weight, "weight")), bias(of_channels(bias, "bias")), scale(scale), eps(eps) {
    TORCH_CHECK_VALUE(activation == "none" || activation == "silu", "nhwc::normalize: expected none or silu, got \"",
                      activation, "\"");
    has_silu = activation == "silu";
  }
  Call(at::Tensor input, at::Tensor weight, at::Tensor bias, double scale, double eps, bool has_silu)
      : input(std::move(input)),
        weight(std::move(weight)),
        bias(std::move(bias)),
        scale(scale),
        eps(eps),
        has_silu(has_silu) {}

  /// Returns numbers of channels, which may have sizes of 1 after these.
  at::Tensor of_channels(const Optional& numbers, const char* name) const {
    if (!numbers) return {};
    TORCH_CHECK(input.dim() > 1 && numbers->dim() > 0 && numbers->sym_size(0) == input.sym_size(1) &&
                    numbers->sym_numel() == input.sym_size(1),
                "nhwc::normalize: expected a ", name, " of a number for each channel of an input of shape ",
                input.sym_sizes(), ", got ", numbers->sym_sizes());
    return numbers->dim() == 1 ? *numbers : numbers->reshape({-1});
  }

  bool is_channels_last() const { return input.dim() > 3 && nhwc::is_channels_last(input); }

  /// Calls `work` with what the kernels of a device read.
  template <typename Work>
  void with_dense(const Work& work) const {
    const at::Tensor dense = to_channels_last(input),
                     factors = weight.defined() ? weight.contiguous() : at::ones({input.size(1)}, input.options()),
                     summands = bias.defined() ? bias.contiguous() : bias;
    work(cpu::ChannelRms{dense, factors, summands, scale, eps, has_silu, input_bias});
  }

  /// Has a bias added to the input by the kernels of a GPU, where nothing is derived. Returns whether they do.
  bool take_input_bias(const at::Tensor& added) {
    if (!input.is_cuda() || needs_gradient({input, weight, bias, added}) || !has_kernels() || !is_unobserved(added)) {
      return false;
    }
    input_bias = of_channels(added, "bias of the input").to(input.scalar_type()).contiguous();
    return true;
  }

  /// Returns whether kernels of ours compute it: of an activation in channels-last, whose parameters have its dtype.
  bool has_kernels() const {
    if (!is_channels_last() || !is_unobserved({input, weight, bias})) return false;
    for (const at::Tensor* each : {&weight, &bias}) {
      if (each->defined() && (each->scalar_type() != input.scalar_type() || each->device() != input.device())) {
        return false;
      }
    }
    const cpu::ChannelRms rms{input, weight, bias, scale, eps, has_silu};
    return input.numel() > 0 && (cpu::can_run(rms) || cuda::can_run(rms));
  }
};

// --- In PyTorch's differentiable operators ---

/// An input and its parameters in the dtype that is computed with, the parameters beside channels. What is not in
/// channels-last is computed as by PyTorch's function.
struct Wide {
  at::Tensor input, weight, bias, length;

  explicit Wide(const Call& call) {
    const auto type = call.input.scalar_type();
    const bool is_half = type == at::kHalf || type == at::kBFloat16;
    const auto wide = call.is_channels_last() && is_half ? at::kFloat : type;
    std::vector<c10::SymInt> sizes(call.input.dim(), 1);
    sizes[1] = call.input.sym_size(1);
    const auto beside = [&](const at::Tensor& numbers) {
      return numbers.defined() ? numbers.to(at::promote_types(wide, numbers.scalar_type())).view_symint(sizes)
                               : numbers;
    };
    input = (call.is_channels_last() ? with_channels_last_grad(call.input) : call.input).to(wide);
    weight = beside(call.weight), bias = beside(call.bias);
    length = at::linalg_vector_norm(input, 2, at::IntArrayRef{1}, /*keepdim=*/true);
  }
  at::Tensor weighted(const at::Tensor& values) const { return weight.defined() ? values * weight : values; }
  /// Returns the result before the activation.
  at::Tensor before(const Call& call) const {
    const at::Tensor normal = input / length.clamp_min(call.eps);
    const at::Tensor y = weighted(call.scale == 1 ? normal : normal * call.scale);
    return bias.defined() ? y + bias : y;
  }
};

at::Tensor composed_normalize(const Call& call) {
  const Wide wide(call);
  const at::Tensor y = wide.before(call);
  auto type = call.input.scalar_type();
  for (const at::Tensor* each : {&call.weight, &call.bias}) {
    if (each->defined()) type = at::promote_types(type, each->scalar_type());
  }
  const at::Tensor out = (call.has_silu ? at::silu(y) : y).to(type);
  return call.is_channels_last() ? as_channels_last_output(out) : out;
}

/// Returns the gradients of input, weight and bias. They do not depend on a length below eps.
std::vector<at::Tensor> composed_gradients(const Call& call, const at::Tensor& grad, const std::vector<bool>& needed) {
  const Wide wide(call);
  at::Tensor before = grad.to(wide.input.scalar_type());
  if (call.has_silu) {
    before = gradient_before(before, wide.before(call), {cpu::ActivationKind::silu});
  }
  const at::Tensor length = wide.length.clamp_min(call.eps), factor = call.scale / length;
  const auto of_channels = [&](const at::Tensor& all, const at::Tensor& parameter) {
    at::DimVector others = {0};
    for (int64_t dim = 2; dim < all.dim(); ++dim) others.push_back(dim);
    return all.sum(others).to(parameter.scalar_type());
  };
  std::vector<at::Tensor> gradients(3);
  if (needed[0]) {
    const at::Tensor of_rows = wide.weighted(before);
    const at::Tensor along = (of_rows * wide.input).sum(at::IntArrayRef{1}, /*keepdim=*/true) / (length * length);
    const at::Tensor turned = wide.input * along.masked_fill(wide.length < call.eps, 0);
    gradients[0] = to_channels_last((factor * (of_rows - turned)).to(call.input.scalar_type()));
  }
  if (needed[1]) gradients[1] = of_channels(before * (wide.input * factor), call.weight);
  if (needed[2]) gradients[2] = of_channels(before, call.bias);
  return gradients;
}

// --- By our kernels ---

std::vector<at::Tensor> gradients_of_normalized(const std::vector<at::Tensor>& gradients,
                                                const Formula::Context& context) {
  const auto& [saved, constants, needed] = context;
  const at::Tensor& grad = gradients[0];
  if (!grad.defined()) return std::vector<at::Tensor>(3);
  const Call call(saved[0], saved[1], saved[2], constants[0].toDouble(), constants[1].toDouble(),
                  constants[2].toBool());
  if (at::GradMode::is_enabled() || !call.has_kernels() || !is_unobserved(grad)) {
    return composed_gradients(call, grad, needed);
  }
  const auto of_parameter = [&](const at::Tensor& parameter, bool is_needed) {
    return is_needed ? at::empty({parameter.numel()}, parameter.options()) : at::Tensor();
  };
  const at::Tensor grad_input = needed[0] ? empty_channels_last(call.input) : at::Tensor(),
                   grad_weight = of_parameter(call.weight, needed[1]), grad_bias = of_parameter(call.bias, needed[2]);
  call.with_dense([&](const cpu::ChannelRms& rms) {
    const auto compute = call.input.is_cuda() ? cuda::channel_rms_norm_backward : cpu::channel_rms_norm_backward;
    compute(rms, to_channels_last(grad), grad_input, grad_weight, grad_bias);
  });
  return {grad_input, grad_weight, grad_bias};
}

const Formula normalize_formula = {"NhwcNormalizeBackward", gradients_of_normalized};

void record_if_needed(const Call& call, const at::Tensor& out) {
  if (!needs_gradient({call.input, call.weight, call.bias})) return;
  record(normalize_formula, out, {call.input, call.weight, call.bias}, {call.input, call.weight, call.bias},
         {call.scale, call.eps, call.has_silu});
}

at::Tensor normalize(const at::Tensor& input, const Optional& weight, const Optional& bias, double scale, double eps,
                     c10::string_view activation, const Optional& input_bias) {
  const cpu::HugePages requested;
  const WithVersions with_versions;
  Call call(input, weight, bias, scale, eps, activation);
  if (input_bias && !call.take_input_bias(*input_bias)) {
    return normalize(with_bias(input, *input_bias), weight, bias, scale, eps, activation, none);
  }
  if (!call.has_kernels()) return composed_normalize(call);
  at::Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = empty_channels_last(input);
    call.with_dense([&](const cpu::ChannelRms& rms) {
      (input.is_cuda() ? cuda::channel_rms_norm : cpu::channel_rms_norm)(rms, out);
    });
  }
  record_if_needed(call, out);
  return out;
}

/// Returns a result that waits, or nothing where kernels do not compute it with an activation.
at::Tensor normalize_waiting(const at::Tensor& input, const Optional& weight, const Optional& bias, double scale,
                             double eps, const Optional& input_bias) {
  Call call(input, weight, bias, scale, eps, "silu");
  if (input_bias && !call.take_input_bias(*input_bias)) return {};
  if (!call.has_kernels() || records_inputs()) return {};
  const at::Tensor waiting = waiting_tensor(input.sizes(), input.scalar_type(), input.device());
  record_if_needed(call, waiting);
  return waiting;
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) {
  m.impl("normalize", TORCH_FN(normalize));
  m.impl("normalize_waiting", TORCH_FN(normalize_waiting));
}
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) { m.impl("normalize", TORCH_FN(normalize)); }

}  // namespace nhwc
