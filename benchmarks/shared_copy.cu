// What a transpose through shared memory costs without the transpose: a copy that goes the same way and keeps the
// order.
#include <cuda_pipeline.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr unsigned threads = 256, in_flight = 4;
extern __shared__ uint4 tile[];

template <bool is_asynchronous>
__global__ void __launch_bounds__(threads)
    copy_tiles(const uint4* source, uint4* destination, std::uint64_t vectors, unsigned vectors_of_a_tile) {
  const std::uint64_t first = std::uint64_t{blockIdx.x} * vectors_of_a_tile, rest = vectors - first;
  const unsigned count = rest < vectors_of_a_tile ? static_cast<unsigned>(rest) : vectors_of_a_tile;
  source += first;
  destination += first;
  if constexpr (is_asynchronous) {
    for (unsigned i = threadIdx.x; i < count; i += threads) __pipeline_memcpy_async(tile + i, source + i, 16);
    __pipeline_commit();
    __pipeline_wait_prior(0);
  } else {
    for (unsigned begin = threadIdx.x; begin < count; begin += in_flight * threads) {
      uint4 loaded[in_flight];
#pragma unroll
      for (unsigned i = 0; i < in_flight; ++i) {
        if (begin + i * threads < count) loaded[i] = source[begin + i * threads];
      }
#pragma unroll
      for (unsigned i = 0; i < in_flight; ++i) {
        if (begin + i * threads < count) tile[begin + i * threads] = loaded[i];
      }
    }
  }
  __syncthreads();
  for (unsigned i = threadIdx.x; i < count; i += threads) destination[i] = tile[i];
}

}  // namespace

/// Copies `bytes`, a multiple of 16, in tiles of `tile_bytes`. Returns what CUDA says of the launch.
extern "C" int shared_copy(const void* source, void* destination, std::uint64_t bytes, unsigned tile_bytes,
                           int is_asynchronous, void* stream) {
  const auto kernel = is_asynchronous ? copy_tiles<true> : copy_tiles<false>;
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  const auto blocks = static_cast<unsigned>((bytes + tile_bytes - 1) / tile_bytes);
  kernel<<<blocks, threads, tile_bytes, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint4*>(source), static_cast<uint4*>(destination), bytes / 16, tile_bytes / 16);
  return cudaGetLastError();
}
