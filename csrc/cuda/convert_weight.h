// Weights on CUDA devices.
#pragma once

#include <ATen/core/Tensor.h>

namespace nhwc::cuda {

/// `nhwc::write_weight` for CUDA tensors, on the current stream of the tensors' device.
void write_weight(const at::Tensor& weight, const at::Tensor& out);

}  // namespace nhwc::cuda
