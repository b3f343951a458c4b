#include "cuda/norms.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <optional>

#include "cuda/norm_kernels.h"

namespace nhwc::cuda {
namespace {

// The compute capabilities, as 90 for sm_90, of which a result in benchmarks/results shows the kernels right and faster
// than PyTorch's round trip: layers-cuda.json, an H200.
constexpr int measured_architectures[] = {90};

NormType type_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return NormType::float32;
    case at::kBFloat16: return NormType::bfloat16;
    case at::kHalf: return NormType::float16;
    default: return NormType::float64;
  }
}

const void* read(const at::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }
void* written(const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; }

/// Returns by how many bytes all pointers are off an alignment to 16.
std::uint32_t offset_of(std::initializer_list<const void*> pointers) {
  const auto offset = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16; };
  const auto first = offset(*pointers.begin());
  const bool is_same = std::all_of(pointers.begin(), pointers.end(), [&](auto each) { return offset(each) == first; });
  return is_same ? static_cast<std::uint32_t>(first) : differing_offsets;
}

/// Returns a number of a device, by default of the current one.
int attribute(cudaDeviceAttr which, at::Device device) {
  int value = 0;
  const int index = device.has_index() ? device.index() : c10::cuda::current_device();
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, index));
  return value;
}

NormPlan plan_of(const GroupNorm& norm, std::uint32_t offset) {
  return plan_norm(norm.samples, norm.rows, static_cast<std::uint32_t>(norm.input.size(1)),
                   static_cast<std::uint32_t>(norm.groups), type_of(norm.input.scalar_type()), offset,
                   attribute(cudaDevAttrMultiProcessorCount, norm.input.device()));
}

NormArguments arguments_of(const GroupNorm& norm, std::uint32_t offset) {
  NormArguments arguments{};
  arguments.plan = plan_of(norm, offset);
  arguments.input = read(norm.input);
  arguments.weight = read(norm.weight);
  arguments.bias = read(norm.bias);
  const at::Tensor& parameter = norm.weight.defined() ? norm.weight : norm.bias;
  arguments.has_float_parameters = parameter.defined() && parameter.scalar_type() == at::kFloat;
  arguments.eps = norm.eps;
  return arguments;
}

void launch(std::initializer_list<NormStep> steps, const GroupNorm& norm, const NormArguments& arguments) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  for (const NormStep step : steps) {
    C10_CUDA_CHECK(kernels::launch(step, type_of(norm.input.scalar_type()), arguments, stream));
  }
}

}  // namespace

bool runs_norms(at::Device device) {
  const std::optional<bool> chosen = norm_switch();
  if (!device.is_cuda() || chosen.has_value()) return device.is_cuda() && *chosen;
  if (c10::cuda::device_count() == 0) return false;
  const int architecture =
      10 * attribute(cudaDevAttrComputeCapabilityMajor, device) + attribute(cudaDevAttrComputeCapabilityMinor, device);
  return std::ranges::find(measured_architectures, architecture) != std::end(measured_architectures);
}

bool can_run(const GroupNorm& norm) {
  constexpr int64_t most_channels = 1 << 24;  // so that products with numbers of a block fit 32 bits
  return norm.input.size(1) <= most_channels && can_launch(plan_of(norm, 0)) &&
         can_launch(plan_of(norm, differing_offsets));
}

void group_norm(const GroupNorm& norm, const at::Tensor& out, const at::Tensor& mean, const at::Tensor& rstd,
                const at::Tensor& variance) {
  const c10::cuda::CUDAGuard guard(norm.input.device());
  NormArguments arguments = arguments_of(norm, offset_of({read(norm.input), read(out)}));
  const auto scratch = [&](std::uint64_t count) { return at::empty({static_cast<int64_t>(count)}, mean.options()); };
  const NormPlan& plan = arguments.plan;
  const at::Tensor sums = scratch(plan.numbers_of_chunks(3)), coefficients = scratch(plan.samples * plan.channels * 3);
  arguments.out = written(out);
  arguments.mean = written(mean);
  arguments.rstd = written(rstd);
  arguments.variance = written(variance);
  arguments.chunk_sums = written(sums);
  arguments.coefficients = written(coefficients);
  if (plan.is_whole()) return launch({NormStep::whole_forward}, norm, arguments);
  launch({NormStep::chunk_moments, NormStep::merge_moments, NormStep::normalise}, norm, arguments);
}

void group_norm_backward(const GroupNorm& norm, const at::Tensor& grad, const at::Tensor& mean, const at::Tensor& rstd,
                         const at::Tensor& grad_input, const at::Tensor& grad_weight, const at::Tensor& grad_bias) {
  const c10::cuda::CUDAGuard guard(norm.input.device());
  const at::Tensor& out = grad_input.defined() ? grad_input : norm.input;
  NormArguments arguments = arguments_of(norm, offset_of({read(norm.input), read(grad), read(out)}));
  const auto scratch = [&](std::uint64_t count) { return at::empty({static_cast<int64_t>(count)}, mean.options()); };
  const NormPlan& plan = arguments.plan;
  const at::Tensor chunk_sums = scratch(plan.numbers_of_chunks(2)),
                   coefficients = scratch(plan.samples * plan.channels * 4),
                   sample_sums = scratch(plan.samples * plan.channels * 2);
  arguments.grad = read(grad);
  arguments.out = written(grad_input);
  arguments.mean = const_cast<void*>(read(mean));
  arguments.rstd = const_cast<void*>(read(rstd));
  arguments.chunk_sums = written(chunk_sums);
  arguments.coefficients = written(coefficients);
  arguments.sample_sums = written(sample_sums);
  arguments.grad_weight = written(grad_weight);
  arguments.grad_bias = written(grad_bias);
  if (plan.is_whole() && grad_input.defined()) {
    launch({NormStep::whole_backward}, norm, arguments);
  } else {
    launch({NormStep::chunk_products, NormStep::merge_products}, norm, arguments);
    if (grad_input.defined()) launch({NormStep::gradient}, norm, arguments);
  }
  if (grad_weight.defined() || grad_bias.defined()) launch({NormStep::parameter_gradients}, norm, arguments);
}

}  // namespace nhwc::cuda
