// The kernels of group norm, without torch, whose headers would take nvcc a minute.
#include <cuda_runtime.h>

#include <utility>

#include "cuda/norm_blocks.h"
#include "cuda/norm_kernels.h"

namespace nhwc::cuda::kernels {
namespace {

extern __shared__ Quad shared_memory[];

// Four blocks of a processor, with 64 registers for a thread; of those that do all steps three, and with doubles two.
constexpr int blocks_of_processor(NormStep step, NormType type) {
  return type == NormType::float64 ? 2 : step >= NormStep::whole_forward ? 3 : 4;
}

template <NormStep step, NormType type, unsigned lanes>
__global__ void __launch_bounds__(norm_threads, blocks_of_processor(step, type))
    run_block(const __grid_constant__ NormArguments arguments) {
  const BlockOfStep<step, type, lanes> block(arguments, blockIdx.x, reinterpret_cast<char*>(shared_memory));
  block.run([](const auto& phase) {
    phase(threadIdx.x);
    __syncthreads();
  });
}

/// Returns the kernel for vectors, or for elements; a step on no activation has one for both.
template <NormStep step, NormType type>
const void* kernel(bool is_vector) {
  constexpr unsigned lanes = is_on_activations(step) ? 16 / bytes_of(type) : 1;
  return reinterpret_cast<const void*>(is_vector ? run_block<step, type, lanes> : run_block<step, type, 1>);
}

template <int step, std::size_t... types>
const void* kernel_of_step(NormType type, bool is_vector, std::index_sequence<types...>) {
  const void* const kernels[] = {kernel<static_cast<NormStep>(step), static_cast<NormType>(types)>(is_vector)...};
  return kernels[static_cast<int>(type)];
}

template <std::size_t... steps>
const void* kernel_of(NormStep step, NormType type, bool is_vector, std::index_sequence<steps...>) {
  const void* const kernels[] = {kernel_of_step<steps>(type, is_vector, std::make_index_sequence<norm_types>())...};
  return kernels[static_cast<int>(step)];
}

}  // namespace

cudaError_t launch(NormStep step, NormType type, const NormArguments& arguments, cudaStream_t stream) {
  const NormPlan& plan = arguments.plan;
  const void* kernel = kernel_of(step, type, plan.lanes > 1, std::make_index_sequence<norm_steps>());
  void* values[] = {const_cast<NormArguments*>(&arguments)};
  return cudaLaunchKernel(kernel, dim3(blocks_of(step, plan)), dim3(norm_threads), values,
                          shared_bytes_of(step, plan, type), stream);
}

}  // namespace nhwc::cuda::kernels
