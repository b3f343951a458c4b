// Padding and interpolation of channels-last activations on a CUDA device. A library that is built without CUDA has no
// kernels for it: no_cuda/resample.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>

#include "cuda/resample_plan.h"

namespace nhwc::cuda {

/// The axes of an activation, the second of which has one index in an image, and whether its gradient is computed.
struct Resampling {
  std::array<ResampleAxis, 3> axes;
  bool is_transposed;
};

/// Returns whether the kernels run on an activation's device, and take its dtype and sizes.
bool can_resample(const Resampling& resampling, const at::Tensor& input);

/// Writes the result on the current stream. Both are dense and in channels-last.
void resample(const Resampling& resampling, const at::Tensor& input, const at::Tensor& out);

}  // namespace nhwc::cuda
