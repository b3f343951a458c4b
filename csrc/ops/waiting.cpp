#include "ops/waiting.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <array>
#include <cmath>
#include <utility>
#include <vector>

#include "cuda/norms.h"
#include "layout/channels_last.h"
#include "ops/autograd_node.h"
#include "ops/composition.h"

namespace nhwc {

using cpu::ActivationKind;

cpu::Activation activation_of(const char* op, c10::string_view name, double parameter) {
  static constexpr std::array<const char*, cpu::activation_kinds> names = {"none", "relu", "leaky_relu",
                                                                           "silu", "gelu", "gelu_tanh"};
  for (int kind = 0; kind < cpu::activation_kinds; ++kind) {
    if (name == names[kind]) return {static_cast<ActivationKind>(kind), parameter};
  }
  TORCH_CHECK_VALUE(false, op, ": expected none, relu, leaky_relu, silu, gelu or gelu_tanh, got \"", name, "\"");
}

at::Tensor activated(const at::Tensor& y, const cpu::Activation& activation) {
  switch (activation.kind) {
    case ActivationKind::relu:
      return std::isinf(activation.parameter) ? at::relu(y) : at::hardtanh(y, 0, activation.parameter);
    case ActivationKind::leaky_relu: return at::leaky_relu(y, activation.parameter);
    case ActivationKind::silu: return at::silu(y);
    case ActivationKind::gelu: return at::gelu(y);
    case ActivationKind::gelu_tanh: return at::gelu(y, "tanh");
    default: return y;
  }
}

at::Tensor gradient_before(const at::Tensor& grad, const at::Tensor& y, const cpu::Activation& activation) {
  switch (activation.kind) {
    case ActivationKind::relu:
      return std::isinf(activation.parameter) ? at::threshold_backward(grad, y, 0)
                                              : at::hardtanh_backward(grad, y, 0, activation.parameter);
    case ActivationKind::leaky_relu:
      return at::leaky_relu_backward(grad, y, activation.parameter, /*self_is_result=*/false);
    case ActivationKind::silu: {
      const at::Tensor sigmoid = at::sigmoid(y);
      return grad * (sigmoid * (1 + y * (1 - sigmoid)));
    }
    case ActivationKind::gelu: {
      const at::Tensor probability = (1 + at::erf(y * M_SQRT1_2)) * 0.5, power = at::exp(y * y * -0.5);
      return grad * (probability + y * power * (M_2_SQRTPI * M_SQRT1_2 / 2));
    }
    case ActivationKind::gelu_tanh: {
      constexpr double twice_root = M_2_SQRTPI * M_SQRT2, cubic = 0.044715;
      const at::Tensor square = y * y, sigmoid = at::sigmoid(y * (1 + square * cubic) * twice_root);
      return grad * (sigmoid + y * sigmoid * (1 - sigmoid) * (1 + square * (3 * cubic)) * twice_root);
    }
    default: return grad;
  }
}

at::Tensor beside_channels(const at::Tensor& numbers, const at::Tensor& activation) {
  at::SymDimVector sizes(activation.dim(), 1);
  sizes[1] = numbers.sym_numel();
  return numbers.reshape_symint(sizes);
}

at::Tensor with_bias(const at::Tensor& convolved, const at::Tensor& bias) {
  return convolved + beside_channels(bias.to(convolved.scalar_type()), convolved);
}

at::Tensor waiting_tensor(at::IntArrayRef sizes, at::ScalarType type, at::Device device) {
  const WithVersions with_versions;
  const auto bytes = static_cast<size_t>(c10::multiply_integers(sizes)) * c10::elementSize(type);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       c10::DataPtr(nullptr, device), /*allocator=*/nullptr,
                                                       /*resizable=*/false);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "torch_nhwc: this is the result of a layer that waits for the activation after it, so that both are computed in "
      "one pass, and it has no memory yet. PyTorch's functions compute it when they read it; code in C++ that reads it "
      "without them cannot. Set the environment variable TORCH_NHWC_PENDING=0");
  const auto key = device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(type));
  return as_new_channels_last(std::move(tensor), sizes);
}

bool records_inputs() {
  const auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
  return callbacks && callbacks->needs_inputs_;
}

namespace {

at::Tensor waiting_like(const at::Tensor& waiting) {
  return waiting_tensor(waiting.sizes(), waiting.scalar_type(), waiting.device());
}

std::vector<at::Tensor> gradient_of_padded(const std::vector<at::Tensor>& gradients, const Formula::Context& context) {
  if (!gradients[0].defined()) return std::vector<at::Tensor>(1);
  std::vector<int64_t> sides = context.constants[0].toIntVector();
  for (int64_t& each : sides) each = -each;
  return {at::constant_pad_nd(gradients[0], sides)};
}

const Formula padded_formula = {"NhwcPadWaitingBackward", gradient_of_padded};

/// Returns a result that waits, of an input with zeros around it.
at::Tensor pad_waiting(const at::Tensor& input, at::IntArrayRef pad) {
  at::DimVector sizes(input.sizes());
  TORCH_CHECK(pad.size() % 2 == 0 && pad.size() <= 2 * sizes.size(),
              "nhwc::pad_waiting: expected two numbers for each of the last dimensions, got ", pad);
  for (size_t side = 0; side < pad.size(); ++side) {
    TORCH_CHECK(pad[side] >= 0, "nhwc::pad_waiting: expected numbers from 0 on, got ", pad);
    sizes[sizes.size() - 1 - side / 2] += pad[side];
  }
  const at::Tensor waiting = waiting_tensor(sizes, input.scalar_type(), input.device());
  if (needs_gradient({input})) record(padded_formula, waiting, {input}, {}, {pad.vec()});
  return waiting;
}

/// A convolution saves no bias, which may change before the backward: its dtype is a constant.
std::vector<at::Tensor> gradients_of_biased(const std::vector<at::Tensor>& gradients, const Formula::Context& context) {
  const at::Tensor& grad = gradients[0];
  if (!grad.defined() || !context.needed[1]) return {grad, {}};
  at::DimVector others = {0};
  for (int64_t dim = 2; dim < grad.dim(); ++dim) others.push_back(dim);
  return {grad, grad.sum(others).to(static_cast<at::ScalarType>(context.constants[0].toInt()))};
}

const Formula biased_formula = {"NhwcBiasWaitingBackward", gradients_of_biased};

/// Returns a result that waits, of a convolution and its bias, or nothing where it has to be added at once: what takes
/// it are our kernels of norms.
at::Tensor bias_waiting(const at::Tensor& convolved, const at::Tensor& bias) {
  const bool is_alike = bias.dim() == 1 && convolved.dim() > 3 && bias.size(0) == convolved.size(1) &&
                        bias.device() == convolved.device() && convolved.is_floating_point();
  if (!is_alike || !is_unobserved({convolved, bias}) || records_inputs() || !is_channels_last(convolved) ||
      convolved.numel() == 0) {
    return {};
  }
  if (convolved.is_cuda() &&
      !cuda::runs_norm(convolved.device(), cuda::NormKind::instance, static_cast<int64_t>(convolved.nbytes()))) {
    return {};
  }
  const at::Tensor waiting = waiting_tensor(convolved.sizes(), convolved.scalar_type(), convolved.device());
  if (waiting.strides() != convolved.strides()) return {};
  if (needs_gradient({convolved, bias})) {
    record(biased_formula, waiting, {convolved, bias}, {}, {static_cast<int64_t>(bias.scalar_type())});
  }
  return waiting;
}

/// Gives a result that waits the memory, the version and the derivative of another tensor.
void waiting_become_(const at::Tensor& waiting, const at::Tensor& value) {
  TORCH_CHECK(waiting.sizes() == value.sizes() && waiting.strides() == value.strides() &&
                  waiting.scalar_type() == value.scalar_type(),
              "nhwc::waiting_become_: expected a tensor of the same sizes, strides and dtype");
  waiting.unsafeGetTensorImpl()->set_storage_keep_dtype(value.storage());
  torch::autograd::impl::set_version_counter(waiting, value.unsafeGetTensorImpl()->version_counter());
  if (value.grad_fn()) {
    torch::autograd::impl::set_gradient_edge(waiting, torch::autograd::impl::gradient_edge(value));
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) {
  m.impl("records_inputs", TORCH_FN(records_inputs));
  m.impl("waiting_like", TORCH_FN(waiting_like));
  m.impl("pad_waiting", TORCH_FN(pad_waiting));
  m.impl("bias_waiting", TORCH_FN(bias_waiting));
  m.impl("waiting_become_", TORCH_FN(waiting_become_));
}

}  // namespace nhwc
