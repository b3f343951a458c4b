// The passes of a convolution by our kernels. Results are channels-last, in canonical strides.
// Of meta tensors, whose sizes may be symbolic, the results are only allocated.
#pragma once

#include <array>

#include "ops/convolution/call.h"

namespace nhwc::kernels {

/// Returns whether a convolution is the products of pixels and a weight, of few inputs or outputs.
bool is_pointwise(const Call& call);

/// Returns whether the kernels compute all passes. Of other convolutions they compute the weight gradient.
bool serve_all_passes(const Call& call);

/// Returns the sizes of the result.
at::SymDimVector output_sizes(const Call& call);

at::Tensor forward(const Call& call);

/// Returns the needed gradients of the input, of the weight, in its layout, and of the bias; the others are undefined.
std::array<at::Tensor, 3> gradients(const Call& call, const at::Tensor& grad, std::array<bool, 3> needed);

}  // namespace nhwc::kernels
