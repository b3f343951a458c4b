// Depthwise convolutions of channels-last activations, by our own kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/output.h"
#include "cpu/work/axes.h"

namespace nhwc::cpu {

/// All tensors are dense and channels-last, of one dtype: float, double, bfloat16 or half. Sizes must be valid, with
/// one input channel a group; any of them may be 0. Sums are floats, or doubles for doubles, and do not depend on the
/// number of threads. The bias may be undefined. What follows is of floats.
void depthwise_forward(const ConvolutionSizes& sizes, const at::Tensor& input, const at::Tensor& weight,
                       const at::Tensor& bias, const at::Tensor& out, const Output& output = {});

/// Writes the gradient of the input.
void depthwise_input_gradient(const ConvolutionSizes& sizes, const at::Tensor& grad, const at::Tensor& weight,
                              const at::Tensor& grad_input);

/// Writes the gradients of the weight and, if `grad_bias` is defined, of the bias.
void depthwise_weight_gradient(const ConvolutionSizes& sizes, const at::Tensor& grad, const at::Tensor& input,
                               const at::Tensor& grad_weight, const at::Tensor& grad_bias);

}  // namespace nhwc::cpu
