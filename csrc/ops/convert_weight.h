// What the functional operators share with their derivatives. Their contract stands on torch_nhwc/ops.h.
#pragma once

#include <ATen/core/Tensor.h>

namespace nhwc {

/// Makes `out` differentiable as the conversion of `weight`, where that is asked for.
void record_conversion(const at::Tensor& weight, const at::Tensor& out);

}  // namespace nhwc
