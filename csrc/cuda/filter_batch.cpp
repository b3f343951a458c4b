#include "cuda/filter_batch.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <optional>

#include "cuda/filter_kernels.h"
#include "layout/memory_format.h"
#include "torch_nhwc/cuda/launch_plan.h"

namespace nhwc::cuda {
namespace {

// Returns what the kernels do to the elements, or nothing where no kernel serves.
std::optional<Elements> elements_of(at::ScalarType from, at::ScalarType to) {
  if (from == at::kFloat && to == at::kBFloat16) return Elements::float_to_bfloat16;
  if (from == at::kFloat && to == at::kHalf) return Elements::float_to_half;
  if (from == at::kBFloat16 && to == at::kFloat) return Elements::bfloat16_to_float;
  if (from == at::kHalf && to == at::kFloat) return Elements::half_to_float;
  if (from != to) return std::nullopt;
  switch (c10::elementSize(from)) {
    case 1: return Elements::bytes1;
    case 2: return Elements::bytes2;
    case 4: return Elements::bytes4;
    case 8: return Elements::bytes8;
    case 16: return Elements::bytes16;
    default: return std::nullopt;
  }
}

Weight permutation_of(const at::Tensor& weight, void* data) {
  const FilterOrder from = filter_order(weight);
  const auto [filters, rows, columns] = filter_shape(weight, from, other_order(from));
  return {data, data, filters, rows, columns, elements_of(weight.scalar_type(), weight.scalar_type()).value()};
}

/// Raises for an error of a kernel: where the library has no code for the GPU, in a sentence that says so.
void check(cudaError_t error, at::Device device) {
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    cudaGetLastError();  // so that nothing else takes it for its own
    int major = 0, minor = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device.index()));
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device.index()));
    TORCH_CHECK(false, "torch_nhwc: the library has no code for ", device, ", a GPU of compute capability ", major, ".",
                minor, ": build it on that machine, or with TORCH_CUDA_ARCH_LIST=", major, ".", minor);
  }
  C10_CUDA_CHECK(error);
}

}  // namespace

std::vector<Weight>& FilterBatch::weights_on(at::Device device) {
  const auto found =
      std::find_if(devices_.begin(), devices_.end(), [&](const auto& on) { return on.device == device; });
  return found != devices_.end() ? found->weights : devices_.emplace_back(OnDevice{device}).weights;
}

bool FilterBatch::add_write(const at::Tensor& weight, const at::Tensor& out) {
  if (weight.numel() == 0) return true;
  const FilterOrder from = filter_order(weight), to = filter_order(out);
  const auto elements = elements_of(weight.scalar_type(), out.scalar_type());
  if (from == FilterOrder::neither || to == FilterOrder::neither || !elements) return false;
  const auto [filters, rows, columns] = filter_shape(weight, from, to);
  const Weight write{weight.const_data_ptr(), out.mutable_data_ptr(), filters, rows, columns, *elements};
  if (!can_plan(write)) return false;
  weights_on(weight.device()).push_back(write);
  return true;
}

void FilterBatch::add_permutation(const at::Tensor& weight) {
  weights_on(weight.device()).push_back(permutation_of(weight, weight.mutable_data_ptr()));
}

void FilterBatch::allocate() {
  for (OnDevice& on : devices_) {
    const c10::cuda::CUDAGuard guard(on.device);
    Limits limits;
    C10_CUDA_CHECK(kernels::get_limits(limits));
    on.launches = plan_launches(on.weights, limits);
    uint64_t scratch_bytes = 0;
    for (const Launch& launch : on.launches) {
      check(kernels::prepare(launch, limits), on.device);
      scratch_bytes = std::max(scratch_bytes, launch.blocks * launch.scratch_bytes);
    }
    const auto options = at::TensorOptions(on.device).dtype(at::kByte);
    if (scratch_bytes != 0) on.scratch = at::empty({static_cast<int64_t>(scratch_bytes)}, options);
  }
}

void FilterBatch::run() const {
  for (const OnDevice& on : devices_) {
    const c10::cuda::CUDAGuard guard(on.device);
    const auto stream = c10::cuda::getCurrentCUDAStream();
    void* scratch = on.scratch.defined() ? on.scratch.mutable_data_ptr() : nullptr;
    for (const Launch& launch : on.launches) check(kernels::launch(launch, scratch, stream), on.device);
  }
}

bool can_permute(const at::Tensor& weight) {
  // Dense strides of neither order are copied instead.
  return filter_order(weight) == FilterOrder::neither || weight.numel() == 0 ||
         can_plan(permutation_of(weight, const_cast<void*>(weight.const_data_ptr())));
}

bool is_captured(at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

}  // namespace nhwc::cuda
