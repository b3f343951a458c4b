// The kernels of depthwise 3D convolutions, without torch, whose headers would take nvcc a minute.
#include <cuda_runtime.h>

#include "cuda/depthwise_blocks.h"
#include "cuda/depthwise_kernels.h"

namespace nhwc::cuda::kernels {
namespace {

extern __shared__ Quad shared_memory[];

template <typename Block>
__device__ void run_block(const DepthwiseArguments& arguments) {
  const Block block(arguments, blockIdx.x, reinterpret_cast<char*>(shared_memory));
  block.run_phases([](const auto& phase) {
    phase(threadIdx.x);
    __syncthreads();
  });
}

template <NormType type, unsigned lanes, unsigned taps, unsigned stride>
__global__ void __launch_bounds__(depthwise_threads, 2) convolve(const __grid_constant__ DepthwiseArguments arguments) {
  run_block<DepthwiseConvolve<type, lanes, taps, stride>>(arguments);
}

template <NormType type, unsigned lanes, unsigned taps, unsigned stride>
__global__ void __launch_bounds__(most_gradient_threads, 1)
    chunk_gradients(const __grid_constant__ DepthwiseArguments arguments) {
  run_block<DepthwiseGradients<type, lanes, taps, stride>>(arguments);
}

template <NormType type>
__global__ void __launch_bounds__(merging_threads)
    merge_gradients(const __grid_constant__ DepthwiseArguments arguments) {
  run_block<DepthwiseMerge<type>>(arguments);
}

template <NormType type, unsigned lanes, unsigned taps, unsigned stride>
const void* kernel_of(DepthwiseStep step) {
  switch (step) {
    case DepthwiseStep::convolve: return reinterpret_cast<const void*>(convolve<type, lanes, taps, stride>);
    case DepthwiseStep::chunk_gradients:
      return reinterpret_cast<const void*>(chunk_gradients<type, lanes, taps, stride>);
    default: return reinterpret_cast<const void*>(merge_gradients<type>);
  }
}

template <NormType type, unsigned lanes, unsigned taps>
const void* kernel_of_stride(DepthwiseStep step, const DepthwisePlan& plan) {
  return plan.stride[2] == 1 ? kernel_of<type, lanes, taps, 1>(step) : kernel_of<type, lanes, taps, 2>(step);
}

template <NormType type, unsigned lanes>
const void* kernel_of_taps(DepthwiseStep step, const DepthwisePlan& plan) {
  switch (plan.kernel[2]) {
    case 3: return kernel_of_stride<type, lanes, 3>(step, plan);
    case 5: return kernel_of_stride<type, lanes, 5>(step, plan);
    default: return kernel_of_stride<type, lanes, 7>(step, plan);
  }
}

template <NormType type>
const void* kernel_of_type(DepthwiseStep step, const DepthwisePlan& plan) {
  return plan.lanes == 1 ? kernel_of_taps<type, 1>(step, plan) : kernel_of_taps<type, depthwise_lanes>(step, plan);
}

}  // namespace

cudaError_t launch(DepthwiseStep step, NormType type, const DepthwiseArguments& arguments, cudaStream_t stream) {
  const DepthwisePlan& plan = arguments.plan;
  const void* kernel = type == NormType::float32    ? kernel_of_type<NormType::float32>(step, plan)
                       : type == NormType::bfloat16 ? kernel_of_type<NormType::bfloat16>(step, plan)
                                                    : kernel_of_type<NormType::float16>(step, plan);
  void* values[] = {const_cast<DepthwiseArguments*>(&arguments)};
  return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks_of(step, plan))), dim3(threads_of(step, plan)),
                          values, shared_bytes_of(step, plan), stream);
}

}  // namespace nhwc::cuda::kernels
