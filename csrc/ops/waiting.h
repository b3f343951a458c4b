// Activations by their names, and results that wait for one: tensors without memory.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <optional>

#include "cpu/group_norm.h"

namespace nhwc {

/// Returns the activation of a name; the operator's own is for the error.
cpu::Activation activation_of(const char* op, c10::string_view name, double parameter);

/// Returns the activation, in PyTorch's differentiable operators.
at::Tensor activated(const at::Tensor& y, const cpu::Activation& activation);

/// Returns the gradient before the activation; for the piecewise linear ones, the output serves in the place of `y`. In
/// operators that take batches of gradients.
at::Tensor gradient_before(const at::Tensor& grad, const at::Tensor& y, const cpu::Activation& activation);

/// Returns a number, or one for each channel, beside activations.
at::Tensor beside_channels(const at::Tensor& numbers, const at::Tensor& activation);

/// Adds the bias of a convolution to its result.
at::Tensor with_bias(const at::Tensor& convolved, const at::Tensor& bias);

/// Returns a channels-last tensor that has no memory: whoever reads it without asking Python gets an error.
at::Tensor waiting_tensor(at::IntArrayRef sizes, at::ScalarType type, at::Device device);

/// Returns whether a profiler looks at the memory of each operator's tensors. What waits has none.
bool records_inputs();

/// Results have versions in the inference mode, too. What waits reads them later, and asks for these.
class WithVersions {
  std::optional<c10::InferenceMode> inference_;
  std::optional<at::NoGradGuard> no_grad_;

 public:
  WithVersions() {
    if (c10::InferenceMode::is_enabled()) inference_.emplace(false), no_grad_.emplace();
  }
};

}  // namespace nhwc
