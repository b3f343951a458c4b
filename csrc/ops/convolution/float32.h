// Which convolutions of half precision are computed in float32: those that oneDNN does not take, and those that it
// computes wrong.
#pragma once

#include "ops/convolution/call.h"

namespace nhwc {

/// Returns whether a call of half precision is slow in PyTorch, or wrong.
bool needs_float32(const Call& call);

}  // namespace nhwc
