// What follows a convolution in the same pass, compiled for one instruction set. Uses neither torch nor code of the
// standard library, like filter_kernels.h.
#pragma once

#include "cpu/norm_kernels.h"

namespace nhwc::cpu {

struct OutputKernels {
  /// For each activation: values = activation(values + residual). The residual may be null.
  void (*finish[activation_kinds])(float* values, const float* residual, std::int64_t count, double parameter);
};

}  // namespace nhwc::cpu
