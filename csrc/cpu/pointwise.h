// Convolutions of one tap with few inputs or outputs, by our own kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/output.h"

namespace nhwc::cpu {

/// Writes the products of each pixel and a weight `[outputs, inputs]` to `out`. Of inputs and outputs, the one has at
/// most `most_few` channels, the other `most_pointwise_channels`. Activations are dense channels-last, and all tensors
/// have one dtype: float, half or bfloat16. The bias may be undefined. What follows is of floats.
void pointwise(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& out,
               const Output& output = {});

}  // namespace nhwc::cpu
