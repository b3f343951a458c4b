// The kernels of RMS norm, for C++ that nvcc does not compile.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/rms_plan.h"

namespace nhwc::cuda::kernels {

cudaError_t launch(bool is_backward, NormType type, bool has_silu, const RmsArguments& arguments, cudaStream_t stream);

}  // namespace nhwc::cuda::kernels
