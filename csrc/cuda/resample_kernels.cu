// The kernels of resampling, without torch, whose headers would take nvcc a minute.
#include <cuda_runtime.h>

#include "cuda/resample_blocks.h"
#include "cuda/resample_kernels.h"

namespace nhwc::cuda::kernels {
namespace {

extern __shared__ Quad shared_taps[];

template <typename Block>
__global__ void __launch_bounds__(resample_threads, Block::blocks_of_processor)
    run_resampling(const __grid_constant__ ResampleArguments arguments) {
  const Block block(arguments, blockIdx.x, reinterpret_cast<char*>(shared_taps));
  block.run([](const auto& phase) {
    phase(threadIdx.x);
    __syncthreads();
  });
}

template <typename Block>
const void* kernel_of(BlockType<Block>) {
  return reinterpret_cast<const void*>(run_resampling<Block>);
}

}  // namespace

cudaError_t launch(NormType type, const ResampleArguments& arguments, cudaStream_t stream) {
  const ResamplePlan& plan = arguments.plan;
  const void* kernel = with_resample_block(type, plan, [](auto block) { return kernel_of(block); });
  void* values[] = {const_cast<ResampleArguments*>(&arguments)};
  return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(plan.blocks())), dim3(resample_threads), values,
                          plan.shared_bytes(type == NormType::float64 ? 8 : 4), stream);
}

}  // namespace nhwc::cuda::kernels
