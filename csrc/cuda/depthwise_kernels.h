// The kernels of depthwise 3D convolutions, for C++ that nvcc does not compile.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/depthwise_plan.h"

namespace nhwc::cuda::kernels {

/// Launches a kernel for 3, 5 or 7 taps along the width with a stride of 1 or 2 there.
cudaError_t launch(DepthwiseStep step, NormType type, const DepthwiseArguments& arguments, cudaStream_t stream);

}  // namespace nhwc::cuda::kernels
