// Group norm over channels-last activations, by kernels of our own.
#pragma once

#include <ATen/core/Tensor.h>

namespace nhwc::cpu {

/// What group norm is given: a dense channels-last activation as rows of channels.
struct GroupNormShape {
  int64_t samples, rows, channels, groups;
};

/// Writes the normalised input, and each group's mean and reciprocal deviation, `[samples, groups]` of float, or of
/// double for doubles. All are dense, `out` lies as `input`; weight and bias, of any floating type, may be undefined.
void group_norm(const GroupNormShape& shape, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                double eps, const at::Tensor& out, const at::Tensor& mean, const at::Tensor& rstd);

/// Writes the gradients that are defined; those of weight and bias are of double.
void group_norm_backward(const GroupNormShape& shape, const at::Tensor& grad, const at::Tensor& input,
                         const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& weight,
                         const at::Tensor& grad_input, const at::Tensor& grad_weight, const at::Tensor& grad_bias);

}  // namespace nhwc::cpu
