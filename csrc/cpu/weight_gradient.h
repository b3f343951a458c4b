// The weight gradient of dense and grouped convolutions over channels-last memory, by our own kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/work/axes.h"

namespace nhwc::cpu {

/// Writes the gradients of the weight and, unless it is undefined, of the bias, `[groups * outputs]`. All tensors have
/// one dtype, which is double, float, bfloat16 or half, and are dense, in the order of `ConvolutionSizes`. Sums are
/// floats, or doubles for doubles. The results do not depend on the number of threads.
///
/// It serves any number of channels, but is made for groups of four and more.
void weight_gradient(const ConvolutionSizes& sizes, const at::Tensor& grad, const at::Tensor& input,
                     const at::Tensor& grad_weight, const at::Tensor& grad_bias);

}  // namespace nhwc::cpu
