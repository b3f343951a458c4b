// The kernels of RMS norm, without torch, whose headers would take nvcc a minute.
#include <cuda_runtime.h>

#include "cuda/rms_blocks.h"
#include "cuda/rms_kernels.h"

namespace nhwc::cuda::kernels {
namespace {

extern __shared__ Quad shared_sums[];

template <typename Block>
__global__ void __launch_bounds__(rms_threads, Block::blocks_of_processor)
    run_rms(const __grid_constant__ RmsArguments arguments) {
  const Block block(arguments, blockIdx.x, reinterpret_cast<char*>(shared_sums));
  block.run([](const auto& phase) {
    phase(threadIdx.x);
    __syncthreads();
  });
}

template <typename Block>
const void* kernel_of(BlockType<Block>) {
  return reinterpret_cast<const void*>(run_rms<Block>);
}

}  // namespace

cudaError_t launch(bool is_backward, NormType type, bool has_silu, const RmsArguments& arguments, cudaStream_t stream) {
  const RmsPlan& plan = arguments.plan;
  const void* kernel = with_rms_block(is_backward, type, has_silu, plan, [](auto block) { return kernel_of(block); });
  void* values[] = {const_cast<RmsArguments*>(&arguments)};
  return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(plan.blocks(is_backward))), dim3(rms_threads), values,
                          plan.shared_bytes(is_backward, type == NormType::float64 ? 8 : 4), stream);
}

}  // namespace nhwc::cuda::kernels
