// The kernels of group norm, without torch, whose headers would take nvcc a minute.
#include <cuda_runtime.h>

#include <utility>

#include "cuda/norm_blocks.h"
#include "cuda/norm_kernels.h"

namespace nhwc::cuda::kernels {
namespace {

extern __shared__ Quad shared_memory[];

// Four blocks of a processor, with 64 registers for a thread; fewer for more registers, where a step does more. With
// doubles two.
constexpr int blocks_of_processor(NormStep step, NormType type, Follower follower) {
  if (type == NormType::float64) return follower == Follower::exponentials ? 1 : 2;
  if (does_all(step)) return 3;
  if (!has_followers(step)) return 4;
  constexpr int of_followers[followers] = {0, 1, 4, 2};
  const int more = (type != input_type(type)) + of_followers[static_cast<int>(follower)];
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000  // whose compiler needs a few registers more
  constexpr bool needs_most = __CUDA_ARCH__ >= 1200;
  if (needs_most && step == NormStep::gradient) return more == 0 ? 3 : follower == Follower::exponentials ? 1 : 2;
  if (more > 0) return 2;
#endif
  const int most = step == NormStep::normalise ? 4 : step == NormStep::gradient ? 1 : 2;
  return more == 0 ? 4 : more < most ? 3 : 2;
}

template <NormStep step, NormType type, unsigned lanes, Follower follower>
__global__ void __launch_bounds__(norm_threads, blocks_of_processor(step, type, follower))
    run_block(const __grid_constant__ NormArguments arguments) {
  const BlockOfStep<step, type, lanes, follower> block(arguments, blockIdx.x, reinterpret_cast<char*>(shared_memory));
  block.run([](const auto& phase) {
    phase(threadIdx.x);
    __syncthreads();
  });
}

/// Returns the kernel for vectors, or for elements; a step on no activation has one for both.
template <NormStep step, NormType type, Follower follower>
const void* kernel(bool is_vector) {
  if constexpr (does_all(step) && type != input_type(type)) {
    return nullptr;
  } else {
    constexpr unsigned lanes = is_on_activations(step) ? 16 / bytes_of(type) : 1;
    return reinterpret_cast<const void*>(is_vector ? run_block<step, type, lanes, follower>
                                                   : run_block<step, type, 1, follower>);
  }
}

template <NormStep step, NormType type>
const void* kernel_of(Follower follower, bool is_vector) {
  if constexpr (has_followers(step)) {
    if (follower == Follower::lines) return kernel<step, type, Follower::lines>(is_vector);
    if (follower == Follower::slopes) return kernel<step, type, Follower::slopes>(is_vector);
    if (follower == Follower::exponentials) return kernel<step, type, Follower::exponentials>(is_vector);
  }
  return kernel<step, type, Follower::nothing>(is_vector);
}

template <NormStep step, std::size_t... types>
const void* kernel_of(NormType type, Follower follower, bool is_vector, std::index_sequence<types...>) {
  const void* const kernels[] = {kernel_of<step, static_cast<NormType>(types)>(follower, is_vector)...};
  return kernels[static_cast<int>(type)];
}

template <std::size_t... steps>
const void* kernel_of(NormStep step, NormType type, Follower follower, bool is_vector, std::index_sequence<steps...>) {
  const void* const kernels[] = {
      kernel_of<static_cast<NormStep>(steps)>(type, follower, is_vector, std::make_index_sequence<norm_types>())...};
  return kernels[static_cast<int>(step)];
}

}  // namespace

cudaError_t find() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes,
                               kernel<NormStep::chunk_moments, NormType::float32, Follower::nothing>(true));
}

cudaError_t launch(NormStep step, NormType type, const NormArguments& arguments, cudaStream_t stream) {
  const NormPlan& plan = arguments.plan;
  const void* kernel =
      kernel_of(step, type, follower_of(step, arguments), plan.lanes > 1, std::make_index_sequence<norm_steps>());
  void* values[] = {const_cast<NormArguments*>(&arguments)};
  return cudaLaunchKernel(kernel, dim3(blocks_of(step, plan)), dim3(norm_threads), values,
                          shared_bytes_of(step, plan, type), stream);
}

}  // namespace nhwc::cuda::kernels
