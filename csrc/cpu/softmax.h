// Softmax and log-softmax over the channels of channels-last activations, by our own kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/softmax_kernels.h"

namespace nhwc::cpu {

/// All tensors are dense and channels-last, of one dtype: float, bfloat16 or half.
/// They have at most `most_softmax_channels` channels.
void softmax(const at::Tensor& input, bool is_log, const at::Tensor& out);

/// Writes the gradient of the input.
void softmax_backward(const at::Tensor& grad, const at::Tensor& output, bool is_log, const at::Tensor& grad_input);

}  // namespace nhwc::cpu
