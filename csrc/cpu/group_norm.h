// Group norm of channels-last activations, by our own kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/norm_kernels.h"

namespace nhwc::cpu {

/// A dense channels-last activation as rows of channels.
struct GroupNormShape {
  int64_t samples, rows, channels, groups;
};

/// Writes the normalised input, and each group's mean and reciprocal deviation, `[samples, groups]` of float, or of
/// double for doubles. All are dense, and `out` has the strides of `input`. Weight and bias may have any floating-point
/// dtype or be undefined. `variance`, of doubles, gets each group's biased variance if it is defined.
///
/// With one sample of all rows and a group for each channel this is batch norm.
void group_norm(const GroupNormShape& shape, const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                double eps, const at::Tensor& out, const at::Tensor& mean, const at::Tensor& rstd,
                const at::Tensor& variance = {});

/// Writes the statistics alone; `mean` and `rstd` of doubles lose nothing.
void norm_statistics(const GroupNormShape& shape, const at::Tensor& input, double eps, const at::Tensor& mean,
                     const at::Tensor& rstd, const at::Tensor& variance = {});

/// Writes the mean and the reciprocal deviation of running statistics, as doubles.
void statistics_of(const at::Tensor& running_mean, const at::Tensor& running_var, double eps, const at::Tensor& mean,
                   const at::Tensor& rstd);

/// What follows a norm, and its parameter: the ceiling of ReLU, or the slope of leaky ReLU. If there are `slopes`, one
/// or as many as channels, they are added to it.
struct Activation {
  ActivationKind kind = ActivationKind::none;
  double parameter = 0;
  at::Tensor slopes = {};
};

/// Returns whether there are kernels of an activation for a dtype: not for doubles if it has exponentials.
bool has_activation(at::ScalarType type, ActivationKind kind);

/// Writes activation(norm(input) + residual), by statistics that are doubles. The residual may be undefined.
void normalise(const GroupNormShape& shape, const at::Tensor& input, const at::Tensor& mean, const at::Tensor& rstd,
               const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& residual,
               const Activation& activation, const at::Tensor& out);

/// Writes the gradients that are defined; those of weight and bias may have any floating-point dtype. If `is_of_input`
/// is false, mean and deviation do not depend on the input, as in batch norm's evaluation mode. The bias is read if an
/// activation follows.
void group_norm_backward(const GroupNormShape& shape, const at::Tensor& grad, const at::Tensor& input,
                         const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& weight,
                         const at::Tensor& grad_input, const at::Tensor& grad_weight, const at::Tensor& grad_bias,
                         bool is_of_input = true, const at::Tensor& bias = {}, const Activation& activation = {});

}  // namespace nhwc::cpu
