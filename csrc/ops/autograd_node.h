// Derivatives of operators: a node of the autograd graph whose backward is a plain function.
//
// Nodes are written by hand because only they also work under torch.func, compiled autograd, double backward, and in
// programs without Python: torch::autograd::Function raises under torch.func, and a formula that is registered from
// Python is missing, without an error, where our Python is not imported.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <vector>

namespace nhwc {

/// The derivative of an operator.
struct Formula {
  /// What a formula reads besides the gradients of the outputs.
  struct Context {
    const std::vector<at::Tensor>& saved;
    const std::vector<c10::IValue>& constants;
    const std::vector<bool>& needed;  ///< for each input of the operator, whether its gradient is needed
  };

  const char* name;  ///< of the node, unique
  /// Returns the gradients of the inputs from those of the outputs, any of which may be undefined. It calls
  /// differentiable operators, so that a graph of the backward can be recorded.
  std::vector<at::Tensor> (*apply)(const std::vector<at::Tensor>& gradients, const Context& context);
};

/// Makes `output` differentiable by a formula.
///
/// `inputs` are the ones that the formula has gradients for. `saved` holds some of them, or tensors without a history;
/// both may contain undefined tensors. The types of `constants` must not vary for one formula.
void record(const Formula& formula, const at::Tensor& output, at::ArrayRef<at::Tensor> inputs,
            at::ArrayRef<at::Tensor> saved, std::vector<c10::IValue> constants, bool saves_output = false);

/// Returns whether the output of an operator on these inputs must be differentiable.
bool needs_gradient(at::ArrayRef<at::Tensor> inputs);

/// Returns whether an input has a tangent of forward mode.
bool has_tangent(at::ArrayRef<at::Tensor> inputs);

}  // namespace nhwc
