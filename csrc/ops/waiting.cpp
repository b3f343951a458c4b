#include "ops/waiting.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <array>
#include <cmath>
#include <utility>

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

}  // namespace nhwc
