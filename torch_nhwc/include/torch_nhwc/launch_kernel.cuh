// Lists of weights on a GPU, a whole model in one launch, casts and permutations in place included:
//
//   Limits limits;
//   limits_of_device(limits);
//   for (const Launch& launch : plan_launches(weights, limits)) {
//     prepare_kernel(launch, limits);
//     launch_kernel(launch, scratch, stream);
//   }
//
// All kernels are compiled, which takes nvcc a quarter of a minute for each architecture. Needs C++17 and CUDA's
// headers.
#pragma once

#include <cstddef>
#include <utility>

#include "torch_nhwc/cuda/launch_plan.h"
#include "torch_nhwc/filter_transpose.cuh"

// Whether kernels may take 32 KB of arguments: from CUDA 12.1 on, where no GPU older than sm_70 is compiled for.
#if !defined(NHWC_LARGE_ARGUMENTS)
#define NHWC_LARGE_ARGUMENTS (CUDART_VERSION >= 12010)
#endif

namespace nhwc {
namespace cuda {
namespace detail {

// Permutes filters in place that are too long for shared memory.
template <Elements elements, unsigned capacity>
__global__ void __launch_bounds__(threads_of_a_block, /*blocks of a processor=*/1)
    permute_long_filters(const __grid_constant__ FilterList<capacity> list, char* scratch,
                         std::uint64_t scratch_bytes) {
  const std::uint32_t filters = LongFilter::count(list.filters, list.size);
  char* shared = reinterpret_cast<char*>(shared_memory);
  for (std::uint32_t number = blockIdx.x; number < filters; number += gridDim.x) {
    const LongFilter filter(list.filters, list.size, number, elements, scratch + blockIdx.x * scratch_bytes);
    Tile<elements>(filter.copy, 0, shared).store(threadIdx.x);
    __syncthreads();
    for (std::uint32_t part = 0; part < filter.tiles; ++part) {
      const Tile<elements> tile(filter.transpose, part, shared);
      tile.load(threadIdx.x);
      __syncthreads();
      tile.store(threadIdx.x);
      __syncthreads();
    }
  }
}

// The kernels of `Elements`, in their order. In place there are no casts.
template <unsigned argument_bytes, std::size_t... kinds>
const void* kernel_among(Elements elements, bool is_long, std::index_sequence<kinds...>) {
  constexpr unsigned capacity = capacity_of(argument_bytes);
  static const void* const convert[] = {
      reinterpret_cast<const void*>(convert_tiles<static_cast<Elements>(kinds), capacity>)...};
  static const void* const permute[] = {
      reinterpret_cast<const void*>(permute_long_filters<Elements::bytes1, capacity>),
      reinterpret_cast<const void*>(permute_long_filters<Elements::bytes2, capacity>),
      reinterpret_cast<const void*>(permute_long_filters<Elements::bytes4, capacity>),
      reinterpret_cast<const void*>(permute_long_filters<Elements::bytes8, capacity>),
      reinterpret_cast<const void*>(permute_long_filters<Elements::bytes16, capacity>)};
  return (is_long ? permute : convert)[static_cast<int>(elements)];
}

inline const void* kernel_of(const Launch& launch) {
  constexpr auto kinds = std::make_index_sequence<kinds_of_elements>();
  const bool is_long = launch.scratch_bytes != 0;
#if NHWC_LARGE_ARGUMENTS
  if (launch.filters.size() > capacity_of(small_argument_bytes)) {
    return kernel_among<large_argument_bytes>(launch.elements, is_long, kinds);
  }
#endif
  return kernel_among<small_argument_bytes>(launch.elements, is_long, kinds);
}

}  // namespace detail

/// Reads what the current device and its driver allow.
inline cudaError_t limits_of_device(Limits& limits) {
  int device = 0, shared_bytes = 0, processors = 0, driver = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error == cudaSuccess) error = cudaDriverGetVersion(&driver);
  if (error != cudaSuccess) return error;
  limits.shared_bytes = static_cast<unsigned>(shared_bytes);
  limits.processors = static_cast<unsigned>(processors);
  limits.argument_bytes = NHWC_LARGE_ARGUMENTS && driver >= 12010 ? large_argument_bytes : small_argument_bytes;
  return cudaSuccess;
}

/// Prepares the first launch of a kernel on a device: it requests as much shared memory as a launch that was planned
/// with `limits` may need. Everything that can fail while the device works fails here.
inline cudaError_t prepare_kernel(const Launch& launch, const Limits& limits) {
  return detail::prepare(detail::kernel_of(launch), limits);
}

/// Launches a kernel that `prepare_kernel` has prepared.
///
/// @param scratch  `launch.blocks * launch.scratch_bytes` bytes on the device, aligned to 16; null where that is 0.
inline cudaError_t launch_kernel(const Launch& launch, void* scratch, cudaStream_t stream) {
  return detail::run(detail::kernel_of(launch), launch, scratch, stream);
}

}  // namespace cuda
}  // namespace nhwc
