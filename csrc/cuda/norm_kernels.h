// The kernels of group norm, for C++ that nvcc does not compile.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/norm_plan.h"

namespace nhwc::cuda::kernels {

cudaError_t launch(NormStep step, NormType type, const NormArguments& arguments, cudaStream_t stream);

}  // namespace nhwc::cuda::kernels
