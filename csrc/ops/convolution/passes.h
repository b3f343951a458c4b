// The passes of a convolution, each computed by who computes it right and fast: PyTorch, PyTorch in float32, or our
// kernels.
#pragma once

#include <array>
#include <vector>

#include "ops/convolution/call.h"

namespace nhwc {

/// Returns whether our kernels compute the result, and each gradient that may be to come.
bool is_by_kernels(const Call& call);

/// Returns whether our kernels compute the result or a gradient that may be to come.
bool is_by_kernels_in_part(const Call& call);

/// Computes a convolution by its passes. PyTorch's are seen by whoever observes its operators.
at::Tensor by_passes(const Call& call);

/// Computes a convolution with all passes by our kernels.
at::Tensor by_all_kernels(const Call& call);

/// Returns gradients of the input, the weight and the bias that can be differentiated, without our kernels. Where
/// PyTorch's own may be wrong, they are those of the composition that takes its place.
std::vector<at::Tensor> composed_gradients(const Call& call, const at::Tensor& grad, std::array<bool, 3> needed);

}  // namespace nhwc
