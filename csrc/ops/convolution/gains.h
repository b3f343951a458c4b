// Which passes of a convolution our kernels compute: what they are faster at than PyTorch, and what it computes wrong.
#pragma once

#include "ops/convolution/call.h"

namespace nhwc {

/// For each pass, whether it is ours.
struct Passes {
  bool forward = false, input_gradient = false, weight_gradient = false;
};

/// Returns the passes that our kernels serve.
Passes passes_of_kernels(const Call& call);

}  // namespace nhwc
