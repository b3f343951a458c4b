// The kernels of group norm, for C++ that nvcc does not compile.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/norm_plan.h"

namespace nhwc::cuda::kernels {

/// Asks for a kernel on the current device, without running it.
cudaError_t find();

cudaError_t launch(NormStep step, NormType type, const NormArguments& arguments, cudaStream_t stream);

}  // namespace nhwc::cuda::kernels
