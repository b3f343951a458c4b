// The passes of our kernels as operators, which compilers leave as they are.
#pragma once

#include <array>

#include "ops/convolution/call.h"

namespace nhwc::opaque {

/// Returns what `kernels::forward` does, by an operator.
at::Tensor forward(const Call& call);

/// Returns what `kernels::gradients` does, by an operator.
std::array<at::Tensor, 3> gradients(const Call& call, const at::Tensor& grad, std::array<bool, 3> needed);

}  // namespace nhwc::opaque
