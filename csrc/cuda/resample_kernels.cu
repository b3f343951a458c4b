// The kernels of resampling, without torch, whose headers would take nvcc a minute.
#include <cuda_runtime.h>

#include "cuda/resample_blocks.h"
#include "cuda/resample_kernels.h"

namespace nhwc::cuda::kernels {
namespace {

extern __shared__ Quad shared_taps[];

template <typename Block, int blocks_of_processor>
__global__ void __launch_bounds__(resample_threads, blocks_of_processor)
    run_resampling(const __grid_constant__ ResampleArguments arguments) {
  const Block block(arguments, blockIdx.x, reinterpret_cast<char*>(shared_taps));
  block.run([](const auto& phase) {
    phase(threadIdx.x);
    __syncthreads();
  });
}

template <unsigned bytes>
const void* copying() {
  return reinterpret_cast<const void*>(run_resampling<CopiedRows<bytes>, 4>);
}

template <NormType type, unsigned lanes, unsigned rows>
const void* summing() {
  // With as many registers as the sums and the loads in flight need.
  constexpr int blocks = type == NormType::float64 ? 2 : rows == 1 ? 4 : lanes == 8 ? 2 : 3;
  return reinterpret_cast<const void*>(run_resampling<SummedRows<type, lanes, rows>, blocks>);
}

template <NormType type>
const void* summing(const ResamplePlan& plan) {
  constexpr unsigned lanes = 16 / bytes_of(type);
  const bool is_vector = plan.bytes == 16;
  if (summed_rows_of(plan.axes[0].mode) == 1) return is_vector ? summing<type, lanes, 1>() : summing<type, 1, 1>();
  return is_vector ? summing<type, lanes, 4>() : summing<type, 1, 4>();
}

const void* kernel_of(NormType type, const ResamplePlan& plan) {
  if (plan.is_copy) {
    switch (plan.bytes) {
      case 1: return copying<1>();
      case 2: return copying<2>();
      case 4: return copying<4>();
      case 8: return copying<8>();
      default: return copying<16>();
    }
  }
  switch (type) {
    case NormType::float32: return summing<NormType::float32>(plan);
    case NormType::bfloat16: return summing<NormType::bfloat16>(plan);
    case NormType::float16: return summing<NormType::float16>(plan);
    default: return summing<NormType::float64>(plan);
  }
}

}  // namespace

cudaError_t launch(NormType type, const ResampleArguments& arguments, cudaStream_t stream) {
  const ResamplePlan& plan = arguments.plan;
  void* values[] = {const_cast<ResampleArguments*>(&arguments)};
  return cudaLaunchKernel(kernel_of(type, plan), dim3(static_cast<unsigned>(plan.blocks())), dim3(resample_threads),
                          values, plan.shared_bytes(type == NormType::float64 ? 8 : 4), stream);
}

}  // namespace nhwc::cuda::kernels
