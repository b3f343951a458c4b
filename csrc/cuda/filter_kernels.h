// The functions of launch_kernel.cuh, for C++ that nvcc does not compile.
#pragma once

#include <cuda_runtime_api.h>

#include "torch_nhwc/cuda/launch.h"

namespace nhwc::cuda::kernels {

cudaError_t get_limits(Limits& limits);
cudaError_t prepare(const Launch& launch, const Limits& limits);
cudaError_t launch(const Launch& launch, void* scratch, cudaStream_t stream);

}  // namespace nhwc::cuda::kernels
