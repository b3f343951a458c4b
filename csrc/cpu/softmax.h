// Softmax of rows on a CPU.
#pragma once

#include <ATen/core/Tensor.h>

namespace nhwc::cpu {

/// Whether there is a kernel that is faster than PyTorch's, for rows of so many elements of this type.
bool has_softmax(at::ScalarType type, int64_t channels);
bool has_softmax_backward(at::ScalarType type);

/// Softmax, or its logarithm, of every row of a contiguous `[..., channels]`. Computed in float32.
void softmax(const at::Tensor& input, const at::Tensor& out, bool log);

/// The gradient of the input, from the output and its gradient; all contiguous.
void softmax_backward(const at::Tensor& grad, const at::Tensor& output, const at::Tensor& out, bool log);

}  // namespace nhwc::cpu
