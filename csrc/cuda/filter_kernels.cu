// All kernels, without torch, whose headers would take nvcc a minute.
#include "filter_kernels.h"
#include "torch_nhwc/launch_kernel.cuh"

namespace nhwc::cuda::kernels {

cudaError_t get_limits(Limits& limits) { return limits_of_device(limits); }
cudaError_t prepare(const Launch& launch, const Limits& limits) { return prepare_kernel(launch, limits); }
cudaError_t launch(const Launch& launch, void* scratch, cudaStream_t stream) {
  return launch_kernel(launch, scratch, stream);
}

}  // namespace nhwc::cuda::kernels
