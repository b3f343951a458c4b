// Group norm of channels-last activations, by our own kernels.
#pragma once

#include <ATen/core/Tensor.h>

namespace nhwc::cpu {

/// A dense channels-last activation as rows of channels.
struct GroupNormShape {
  int64_t samples, rows, channels, groups;
};

/// Writes the normalised input, and each group's mean and reciprocal deviation, `[samples, groups]` of float, or of
/// double for doubles. All are dense, and `out` has the strides of `input`. Weight and bias may have any floating-point
/// dtype or be undefined.
void group_norm(const GroupNormShape& shape, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                double eps, const at::Tensor& out, const at::Tensor& mean, const at::Tensor& rstd);

/// Writes the gradients that are defined; those of weight and bias are doubles.
void group_norm_backward(const GroupNormShape& shape, const at::Tensor& grad, const at::Tensor& input,
                         const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& weight,
                         const at::Tensor& grad_input, const at::Tensor& grad_weight, const at::Tensor& grad_bias);

}  // namespace nhwc::cpu
