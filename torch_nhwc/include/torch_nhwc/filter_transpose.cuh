// The filter transpose on a GPU: the kernels, and the launch for one weight.
//
//   nhwc::cuda::filter_transpose(source, destination, filters, rows, columns, stream);
//
// is `filter_transpose` of filter_transpose.h for memory on the device: from contiguous to channels-last the rows are
// the channels and the columns the taps, back it is the other way round. launch_kernel.cuh takes whole lists of
// weights, and permutes in place.
//
// For nvcc; needs C++17 and CUDA's own headers.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "torch_nhwc/cuda/launch_plan.h"
#include "torch_nhwc/cuda/tile.h"
#include "torch_nhwc/version.h"

namespace nhwc {
namespace cuda {

namespace detail {

// Blocks per processor, limited by registers: with 48 for a thread, or 64 where a thread holds more. With 64, too,
// where a processor has no more than 1024 threads, and from 12.0 on, where the compiler needs them.
constexpr unsigned blocks_of_a_processor(Elements elements) {
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 800 || __CUDA_ARCH__ >= 1200)
  constexpr unsigned most = 4;
#else
  constexpr unsigned most = 5;
#endif
  return destination_bytes(elements) > source_bytes(elements) || source_bytes(elements) == 8 ? 4 : most;
}

extern __shared__ Quad shared_memory[];

template <Elements elements, unsigned capacity>
__global__ void __launch_bounds__(threads_of_a_block, blocks_of_a_processor(elements))
    convert_tiles(const __grid_constant__ FilterList<capacity> list) {
  const Filters filters = filters_of_block(list.filters, list.size, blockIdx.x);
  const Tile<elements> tile(filters, blockIdx.x - filters.first_block, reinterpret_cast<char*>(shared_memory));
  tile.load(threadIdx.x);
  __syncthreads();
  tile.store(threadIdx.x);
}

inline cudaError_t prepare(const void* kernel, const Limits& limits) {
  if (limits.shared_bytes > plain_shared_bytes) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                   static_cast<int>(limits.shared_bytes));
    if (error != cudaSuccess) return error;
  }
  // Nothing is read twice, so the first-level cache is better used for more blocks.
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
}

inline cudaError_t run(const void* kernel, const Launch& launch, void* scratch, cudaStream_t stream) {
  // Lists of all capacities have the same beginning, and the runtime copies as much as the kernel takes.
  FilterList<capacity_of(large_argument_bytes)> list;
  list.size = static_cast<std::uint32_t>(launch.filters.size());
  std::copy(launch.filters.begin(), launch.filters.end(), list.filters);
  std::uint64_t scratch_bytes = launch.scratch_bytes;
  void* arguments[] = {&list, &scratch, &scratch_bytes};
  return cudaLaunchKernel(kernel, dim3(launch.blocks), dim3(threads_of_a_block), arguments, launch.shared_bytes,
                          stream);
}

}  // namespace detail

/// Transposes `filters` consecutive row-major matrices from `rows` x `columns` to `columns` x `rows`, in the current
/// device's memory and on `stream`; on the way the elements are moved, or cast, as `elements` says. Its kernel is the
/// only one that is compiled.
///
/// @param source       `filters * rows * columns` elements, read only, aligned to their size.
/// @param destination  as many elements; must not overlap `source`.
/// @return cudaErrorInvalidValue for misaligned pointers, one memory for both, or filters of 2^31 elements and more;
///         otherwise the result of the launch.
template <Elements elements>
cudaError_t filter_transpose(const void* source, void* destination, std::int64_t filters, std::int64_t rows,
                             std::int64_t columns, cudaStream_t stream = nullptr) {
  const Weight weight{source, destination, filters, rows, columns, elements};
  const bool is_in_place = source == destination && source != nullptr;
  if (is_in_place || !can_plan(weight)) return cudaErrorInvalidValue;
  const auto* kernel =
      reinterpret_cast<const void*>(detail::convert_tiles<elements, capacity_of(small_argument_bytes)>);
  const Limits limits;
  cudaError_t error = detail::prepare(kernel, limits);
  for (const Launch& launch : plan_launches({weight}, limits)) {
    if (error == cudaSuccess) error = detail::run(kernel, launch, nullptr, stream);
  }
  return error;
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
  return filter_transpose<elements>(source, destination, filters, rows, columns, stream);
}

}  // namespace cuda
}  // namespace nhwc
