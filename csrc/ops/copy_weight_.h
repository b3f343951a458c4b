// What copy_weight_ checks under every dispatch key.
#pragma once

#include <ATen/core/Tensor.h>

namespace nhwc {

/// Raises on arguments that `copy_weight_` does not take, but for strides. Sizes and strides may be symbolic.
void check_copy(const at::Tensor& self, const at::Tensor& weight);

}  // namespace nhwc
