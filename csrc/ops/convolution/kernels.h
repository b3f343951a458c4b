// The passes of a convolution by our kernels. Activations are channels-last, and dense gradients in canonical strides.
#pragma once

#include <utility>

#include "ops/convolution/call.h"

namespace nhwc::kernels {

at::Tensor forward(const Call& call);
at::Tensor input_gradient(const Call& call, const at::Tensor& grad);

/// Returns the gradients of the weight, in its layout, and of the bias, which is undefined if it is not needed.
std::pair<at::Tensor, at::Tensor> weight_gradient(const Call& call, const at::Tensor& grad, bool of_bias);

}  // namespace nhwc::kernels
