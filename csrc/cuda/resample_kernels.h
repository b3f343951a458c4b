// The kernels of resampling, for C++ that nvcc does not compile.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/resample_plan.h"

namespace nhwc::cuda::kernels {

cudaError_t launch(NormType type, const ResampleArguments& arguments, cudaStream_t stream);

}  // namespace nhwc::cuda::kernels
