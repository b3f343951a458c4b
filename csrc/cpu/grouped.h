// Grouped convolutions of few channels a group, by our own kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/convolution_sizes.h"

namespace nhwc::cpu {

/// Writes the convolution to `out`. All tensors are dense channels-last and have one dtype: float, double, half or
/// bfloat16. The bias may be undefined.
void grouped_forward(const ConvolutionSizes& sizes, const at::Tensor& input, const at::Tensor& weight,
                     const at::Tensor& bias, const at::Tensor& out);

/// Writes the gradient of the input, `grad_input`, for the gradient of the output.
void grouped_input_gradient(const ConvolutionSizes& sizes, const at::Tensor& grad, const at::Tensor& weight,
                            const at::Tensor& grad_input);

}  // namespace nhwc::cpu
