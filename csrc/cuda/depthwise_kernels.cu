// The kernels of depthwise 3D convolutions, without torch, whose headers would take nvcc a minute.
#include <cuda_runtime.h>

#include "cuda/depthwise_blocks.h"
#include "cuda/depthwise_kernels.h"

namespace nhwc::cuda::kernels {
namespace {

extern __shared__ Quad shared_memory[];

template <typename Block>
__global__ void __launch_bounds__(Block::most_threads, Block::blocks_of_processor)
    run_block(const __grid_constant__ DepthwiseArguments arguments) {
  const Block block(arguments, blockIdx.x, reinterpret_cast<char*>(shared_memory));
  block.run_phases([](const auto& phase) {
    phase(threadIdx.x);
    __syncthreads();
  });
}

template <typename Block>
const void* kernel_of(BlockType<Block>) {
  return reinterpret_cast<const void*>(run_block<Block>);
}

}  // namespace

cudaError_t launch(DepthwiseStep step, NormType type, const DepthwiseArguments& arguments, cudaStream_t stream) {
  const DepthwisePlan& plan = arguments.plan;
  const void* kernel = with_depthwise_block(step, type, plan, [](auto block) { return kernel_of(block); });
  void* values[] = {const_cast<DepthwiseArguments*>(&arguments)};
  return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks_of(step, plan))), dim3(threads_of(step, plan)),
                          values, shared_bytes_of(step, plan), stream);
}

}  // namespace nhwc::cuda::kernels
