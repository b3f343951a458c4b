// Softmax of rows on a CPU, where a row has few channels.
#pragma once

#include <ATen/core/Tensor.h>

namespace nhwc::cpu {

/// Whether the functions below are for rows of so many elements of this type.
bool has_softmax(at::ScalarType type, int64_t channels);

/// Softmax, or its logarithm, of every row of a contiguous `[..., channels]`. Computed in float32.
void softmax(const at::Tensor& input, const at::Tensor& out, bool log);

/// The gradient of the input, from the output and its gradient; all contiguous.
void softmax_backward(const at::Tensor& grad, const at::Tensor& output, const at::Tensor& out, bool log);

}  // namespace nhwc::cpu
