// Derivatives of operators: a node of the autograd graph whose backward is a plain function.
//
// Nodes are made by hand because only this form also passes torch.func, compiled autograd, double backward, and
// programs that never start Python: torch::autograd::Function raises under torch.func, and a formula registered from
// Python is lost, without an error, where our Python is not imported.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <vector>

namespace nhwc {

/// How gradients pass through an operator.
struct Formula {
  /// What a formula is given.
  struct Context {
    const std::vector<at::Tensor>& saved;
    const std::vector<c10::IValue>& constants;
    const std::vector<bool>& needed;  ///< for each input of the operator, whether a gradient is asked for
  };

  const char* name;  ///< of the node, no two alike
  /// The gradients of the inputs, from those of the outputs, any of which may be undefined. Its calls are
  /// differentiable where a graph is made of them.
  std::vector<at::Tensor> (*apply)(const std::vector<at::Tensor>& gradients, const Context& context);
};

/// Makes `output` differentiable by a formula.
///
/// `inputs` are those that the formula has gradients for. What is saved is one of them, or a tensor without a history;
/// an undefined tensor may be among both. Constants are always of the same types for one formula.
void record(const Formula& formula, const at::Tensor& output, at::ArrayRef<at::Tensor> inputs,
            at::ArrayRef<at::Tensor> saved, std::vector<c10::IValue> constants, bool saves_output = false);

/// Whether the output of an operator on these inputs is to be differentiable.
bool needs_gradient(at::ArrayRef<at::Tensor> inputs);

/// Whether one of them has a tangent of forward mode.
bool has_tangent(at::ArrayRef<at::Tensor> inputs);

}  // namespace nhwc
