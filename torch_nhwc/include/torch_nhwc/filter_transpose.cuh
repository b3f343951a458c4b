// The filter transpose on a GPU: the kernels, and their launch.
//
//   nhwc::cuda::filter_transpose(source, destination, filters, rows, columns, stream);
//
// is `filter_transpose` of filter_transpose.h for memory on the device: from contiguous to channels-last the rows are
// the channels and the columns the taps, back it is the other way round. Many weights at once, casts and permutations
// in place are planned by `plan_launches` of launch_plan.h and launched one by one:
//
//   for (const Launch& launch : plan_launches(weights, limits)) launch_kernel(launch, scratch, stream);
//
// For nvcc; needs C++17 and CUDA's own headers.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "torch_nhwc/launch_plan.h"
#include "torch_nhwc/tile.h"
#include "torch_nhwc/version.h"

// Whether kernels may take 32 KB of arguments: from CUDA 12.1 on, where no GPU older than sm_70 is compiled for.
#if !defined(NHWC_LARGE_ARGUMENTS)
#define NHWC_LARGE_ARGUMENTS (CUDART_VERSION >= 12010)
#endif

namespace nhwc {
namespace cuda {

constexpr unsigned small_argument_bytes = 4 << 10, large_argument_bytes = (32 << 10) - 4;

namespace detail {

extern __shared__ Quad shared_memory[];

template <Elements elements, unsigned capacity>
__global__ void __launch_bounds__(threads_of_a_block) convert_tiles(const __grid_constant__ FilterList<capacity> list) {
  const Filters filters = filters_of_block(list.filters, list.size, blockIdx.x);
  const Tile<elements> tile(filters, blockIdx.x - filters.first_block, reinterpret_cast<char*>(shared_memory));
  tile.load(threadIdx.x);
  __syncthreads();
  tile.store(threadIdx.x);
}

// Filters that no shared memory holds, in place.
template <Elements elements, unsigned capacity>
__global__ void __launch_bounds__(threads_of_a_block, /*blocks of a processor=*/1)
    permute_long_filters(const __grid_constant__ FilterList<capacity> list, char* scratch,
                         std::uint64_t scratch_bytes) {
  const Filters& found = filters_of_block(list.filters, list.size, blockIdx.x);
  const bool is_last = &found == &list.filters[list.size - 1];
  const std::uint32_t blocks = (is_last ? gridDim.x : (&found)[1].first_block) - found.first_block;
  const Filters filters = found;
  char* shared = reinterpret_cast<char*>(shared_memory);
  for (std::uint32_t index = blockIdx.x - filters.first_block; index < filters.count; index += blocks) {
    const LongFilter filter(filters, elements, index, scratch + blockIdx.x * scratch_bytes);
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

// The kernels of `Elements`, in their order. A cast has no place of its own to be done in.
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

/// What the current device and its driver allow.
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

/// What the first launch of a kernel on a device needs: so much shared memory as a launch that was planned with
/// `limits` may ask for. Whatever can fail without the device failing, fails here.
inline cudaError_t prepare_kernel(const Launch& launch, const Limits& limits) {
  const void* kernel = detail::kernel_of(launch);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(limits.shared_bytes));
  if (error != cudaSuccess) return error;
  // Nothing is read twice, so the first-level cache is better used for more blocks.
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

/// Launches a kernel that `prepare_kernel` has prepared.
///
/// @param scratch  `launch.blocks * launch.scratch_bytes` bytes on the device, aligned to 16; null where that is 0.
inline cudaError_t launch_kernel(const Launch& launch, void* scratch, cudaStream_t stream) {
  // The lists of all capacities begin alike, and the runtime copies as much as the kernel takes.
  FilterList<capacity_of(large_argument_bytes)> list;
  list.size = static_cast<std::uint32_t>(launch.filters.size());
  std::copy(launch.filters.begin(), launch.filters.end(), list.filters);
  std::uint64_t scratch_bytes = launch.scratch_bytes;
  void* arguments[] = {&list, &scratch, &scratch_bytes};
  return cudaLaunchKernel(detail::kernel_of(launch), dim3(launch.blocks), dim3(threads_of_a_block), arguments,
                          launch.shared_bytes, stream);
}

/// Transposes `filters` consecutive row-major matrices from `rows` x `columns` to `columns` x `rows`, in the current
/// device's memory and on `stream`; on the way the elements are moved or cast as `elements` says.
///
/// @param source       `filters * rows * columns` elements, read only, aligned to their size.
/// @param destination  as many elements; must not overlap `source`.
/// @return cudaErrorInvalidValue for misaligned pointers, one memory for both, or filters of 2^31 elements and more;
///         else what CUDA says of the launch.
inline cudaError_t filter_transpose(Elements elements, const void* source, void* destination, std::int64_t filters,
                                    std::int64_t rows, std::int64_t columns, cudaStream_t stream = nullptr) {
  const Weight weight{source, destination, filters, rows, columns, elements};
  if (source == destination || !can_plan(weight)) return cudaErrorInvalidValue;
  const Limits limits;
  for (const Launch& launch : plan_launches({weight}, limits)) {
    cudaError_t error = prepare_kernel(launch, limits);
    if (error == cudaSuccess) error = launch_kernel(launch, nullptr, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

/// The same for elements of any trivially copyable type of 1, 2, 4, 8 or 16 bytes.
template <typename Element>
cudaError_t filter_transpose(const Element* source, Element* destination, std::int64_t filters, std::int64_t rows,
                             std::int64_t columns, cudaStream_t stream = nullptr) {
  static_assert(std::is_trivially_copyable_v<Element>, "filters are moved as bytes");
  constexpr std::size_t bytes = sizeof(Element);
  static_assert(bytes <= 16 && (bytes & (bytes - 1)) == 0, "elements have 1, 2, 4, 8 or 16 bytes");
  constexpr Elements elements = bytes == 1   ? Elements::bytes1
                                : bytes == 2 ? Elements::bytes2
                                : bytes == 4 ? Elements::bytes4
                                : bytes == 8 ? Elements::bytes8
                                             : Elements::bytes16;
  return filter_transpose(elements, source, destination, filters, rows, columns, stream);
}

}  // namespace cuda
}  // namespace nhwc
