// Convolutions of half precision in float32: those that oneDNN does not take, and those that it computes wrong.
#pragma once

#include "ops/convolution/call.h"

namespace nhwc {

/// Returns whether a call of half precision is slow in PyTorch, or wrong.
bool needs_float32(const Call& call);

/// Computes a call of half precision in float32, and saves for the backward what PyTorch saves. Derivatives of higher
/// order are PyTorch's.
at::Tensor by_float32(const Call& call);

}  // namespace nhwc
