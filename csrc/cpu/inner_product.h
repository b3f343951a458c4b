// Dense convolutions of few positions, by our own kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/work/axes.h"

namespace nhwc::cpu {

/// Writes a convolution of one group. All tensors are dense and channels-last, of one dtype: float, half or bfloat16.
/// Sizes must be valid. Sums are floats, and do not depend on the number of threads. The bias may be undefined.
///
/// The weight is not copied. Memory beside the result: at most 1 MB a thread, or twelve windows.
void inner_product_forward(const ConvolutionSizes& sizes, const at::Tensor& input, const at::Tensor& weight,
                           const at::Tensor& bias, const at::Tensor& out);

}  // namespace nhwc::cpu
