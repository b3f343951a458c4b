#include "cuda/norms.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <optional>

#include "cuda/norm_kernels.h"

namespace nhwc::cuda {
namespace {

// The compute capabilities, as 90 for sm_90, of which a result in benchmarks/results shows the kernels right and faster
// than PyTorch's round trip: layers-cuda.json, an H200.
constexpr int measured_architectures[] = {90};

NormType type_of(at::ScalarType input, at::ScalarType result) {
  switch (input) {
    case at::kFloat: return NormType::float32;
    case at::kBFloat16: return result == at::kFloat ? NormType::bfloat16_to_float32 : NormType::bfloat16;
    case at::kHalf: return result == at::kFloat ? NormType::float16_to_float32 : NormType::float16;
    default: return NormType::float64;
  }
}
NormType type_of(const GroupNorm& norm) { return type_of(norm.input.scalar_type(), norm.type_of_result); }

const void* read(const at::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }
void* written(const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; }

/// Returns by how many bytes all pointers that are defined are off an alignment to 16. Those of a result of another
/// type than the input have to be aligned.
std::uint32_t offset_of(const GroupNorm& norm, std::initializer_list<const void*> pointers) {
  const auto offset = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16; };
  const auto first = offset(*pointers.begin());
  const bool is_same =
      std::all_of(pointers.begin(), pointers.end(), [&](auto each) { return !each || offset(each) == first; });
  const bool is_cast = norm.type_of_result != norm.input.scalar_type();
  return is_same && (!is_cast || first == 0) ? static_cast<std::uint32_t>(first) : differing_offsets;
}

/// What `set_norms` said: by device and kind.
constexpr int most_devices = 64;
constexpr int64_t unknown = -2;
struct Measured : std::array<std::array<std::atomic<int64_t>, kinds_of_norms>, most_devices> {
  Measured() {
    for (auto& kinds : *this) {
      for (auto& least : kinds) least = unknown;
    }
  }
} measured;

/// Returns the number of a device, by default of the current one.
int index_of(at::Device device) { return device.has_index() ? device.index() : c10::cuda::current_device(); }

int attribute(cudaDeviceAttr which, at::Device device) {
  int value = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, which, index_of(device)));
  return value;
}

template <auto plan = plan_norm>
NormPlan plan_of(const GroupNorm& norm, std::uint32_t offset) {
  return plan(norm.samples, norm.rows, static_cast<std::uint32_t>(norm.input.size(1)),
              static_cast<std::uint32_t>(norm.groups), input_type(type_of(norm)), offset,
              attribute(cudaDevAttrMultiProcessorCount, norm.input.device()));
}

NormArguments arguments_of(const GroupNorm& norm, const NormPlan& plan, const at::Tensor& mean,
                           const at::Tensor& rstd) {
  NormArguments arguments{};
  arguments.plan = plan;
  arguments.input = read(norm.input);
  arguments.weight = read(norm.weight);
  arguments.bias = read(norm.bias);
  arguments.mean = const_cast<void*>(read(mean));
  arguments.rstd = const_cast<void*>(read(rstd));
  arguments.input_bias = read(norm.input_bias);
  for (const at::Tensor* each : {&norm.weight, &norm.bias, &norm.running_mean, &norm.input_bias}) {
    if (each->defined()) arguments.has_float_parameters = each->scalar_type() == at::kFloat;
  }
  arguments.has_double_statistics = mean.scalar_type() == at::kDouble;
  arguments.is_of_input = norm.is_of_input;
  arguments.momentum = norm.momentum;
  arguments.eps = norm.eps;
  return arguments;
}

/// Returns slopes as the kernels read them, or nothing.
at::Tensor slopes_of(const GroupNorm& norm, const cpu::Activation& activation) {
  if (!activation.slopes.defined()) return {};
  const at::Tensor slopes = activation.slopes.contiguous();
  return slopes.scalar_type() == norm.input.scalar_type() ? slopes : slopes.to(at::kFloat);
}

void set_activation(NormArguments& arguments, const cpu::Activation& activation, const at::Tensor& slopes) {
  static_assert(static_cast<int>(NormActivation::gelu_tanh) == static_cast<int>(cpu::ActivationKind::gelu_tanh));
  arguments.activation = static_cast<NormActivation>(activation.kind);
  arguments.parameter = std::isinf(activation.parameter) ? NAN : activation.parameter;  // no ceiling
  if (!slopes.defined()) return;
  arguments.slopes = read(slopes);
  arguments.has_float_slopes = slopes.scalar_type() == at::kFloat;
  arguments.has_one_slope = slopes.numel() == 1;
}

/// Returns scratch of sums and coefficients, which have the type that the kernels compute with.
at::Tensor scratch(const GroupNorm& norm, std::uint64_t count) {
  const at::ScalarType type = norm.input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::empty({static_cast<int64_t>(count)}, norm.input.options().dtype(type));
}

void launch(std::initializer_list<NormStep> steps, const GroupNorm& norm, const NormArguments& arguments) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  for (const NormStep step : steps) {
    C10_CUDA_CHECK(kernels::launch(step, type_of(norm), arguments_of_step(step, arguments), stream));
  }
}

}  // namespace

void set_norms(at::Device device, at::IntArrayRef least_bytes) {
  const int index = index_of(device);
  if (index >= most_devices) return;
  for (int kind = 0; kind < kinds_of_norms; ++kind) {
    measured[index][kind] = least_bytes.empty() ? unknown : std::max<int64_t>(-1, least_bytes[kind]);
  }
}

bool is_measured(at::Device device) {
  const int index = index_of(device);
  return index < most_devices && measured[index][0] != unknown;
}

bool runs_norm(at::Device device, NormKind kind, int64_t bytes) {
  const std::optional<bool> chosen = norm_switch();
  if (!device.is_cuda() || chosen.has_value()) return device.is_cuda() && *chosen;
  if (c10::cuda::device_count() == 0) return false;
  if (is_measured(device)) {
    const int64_t least = measured[index_of(device)][static_cast<int>(kind)];
    return least >= 0 && bytes >= least;
  }
  const int architecture =
      10 * attribute(cudaDevAttrComputeCapabilityMajor, device) + attribute(cudaDevAttrComputeCapabilityMinor, device);
  return std::ranges::find(measured_architectures, architecture) != std::end(measured_architectures);
}

bool runs_norms(at::Device device) {
  constexpr int64_t any = std::numeric_limits<int64_t>::max();
  return runs_norm(device, NormKind::group, any) || runs_norm(device, NormKind::instance, any) ||
         runs_norm(device, NormKind::batch, any);
}

std::string missing_image(at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  const cudaError_t error = kernels::find();
  if (error == cudaSuccess) return "";
  cudaGetLastError();  // so that nothing else takes it for its own
  return cudaGetErrorString(error);
}

bool can_run(const GroupNorm& norm) {
  constexpr int64_t most_channels = 1 << 24;  // so that products with numbers of a block fit 32 bits
  return norm.input.size(1) <= most_channels && can_launch(plan_of(norm, 0)) &&
         can_launch(plan_of(norm, differing_offsets));
}

void group_norm(const GroupNorm& norm, const at::Tensor& out, const at::Tensor& mean, const at::Tensor& rstd,
                const at::Tensor& variance) {
  const c10::cuda::CUDAGuard guard(norm.input.device());
  if (!norm.is_of_input) {
    norm_statistics(norm, mean, rstd);
    return normalise(norm, mean, rstd, {}, {}, out);
  }
  const NormPlan plan = plan_of(norm, offset_of(norm, {read(norm.input), read(out)}));
  NormArguments arguments = arguments_of(norm, plan, mean, rstd);
  const at::Tensor sums = scratch(norm, plan.numbers_of_chunks(3)),
                   coefficients = scratch(norm, plan.samples * plan.channels * 3);
  arguments.out = written(out);
  arguments.variance = written(variance);
  arguments.running_mean = written(norm.running_mean);
  arguments.running_var = written(norm.running_var);
  arguments.chunk_sums = written(sums);
  arguments.coefficients = written(coefficients);
  if (plan.is_whole()) return launch({NormStep::whole_forward}, norm, arguments);
  launch({NormStep::chunk_moments, NormStep::merge_moments, NormStep::normalise}, norm, arguments);
}

void norm_statistics(const GroupNorm& norm, const at::Tensor& mean, const at::Tensor& rstd) {
  const c10::cuda::CUDAGuard guard(norm.input.device());
  const NormPlan plan = plan_of<plan_norm_in_chunks>(norm, offset_of(norm, {read(norm.input)}));
  NormArguments arguments = arguments_of(norm, plan, mean, rstd);
  arguments.running_mean = const_cast<void*>(read(norm.running_mean));
  arguments.running_var = const_cast<void*>(read(norm.running_var));
  if (!norm.is_of_input) return launch({NormStep::known_statistics}, norm, arguments);
  const at::Tensor sums = scratch(norm, plan.numbers_of_chunks(3));
  arguments.chunk_sums = written(sums);
  launch({NormStep::chunk_moments, NormStep::merge_moments}, norm, arguments);
}

void normalise(const GroupNorm& norm, const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& residual,
               const cpu::Activation& activation, const at::Tensor& out) {
  const c10::cuda::CUDAGuard guard(norm.input.device());
  const std::uint32_t offset = offset_of(norm, {read(norm.input), read(residual), read(out)});
  NormArguments arguments = arguments_of(norm, plan_of<plan_norm_in_chunks>(norm, offset), mean, rstd);
  const at::Tensor slopes = slopes_of(norm, activation);
  set_activation(arguments, activation, slopes);
  arguments.residual = read(residual);
  arguments.out = written(out);
  launch({NormStep::normalise}, norm, arguments);
}

void group_norm_backward(const GroupNorm& norm, const at::Tensor& grad, const at::Tensor& mean, const at::Tensor& rstd,
                         const at::Tensor& grad_input, const at::Tensor& grad_weight, const at::Tensor& grad_bias,
                         const cpu::Activation& activation) {
  const c10::cuda::CUDAGuard guard(norm.input.device());
  const std::uint32_t offset = offset_of(norm, {read(norm.input), read(grad), read(grad_input)});
  const bool is_alone = activation.kind == cpu::ActivationKind::none && norm.type_of_result == norm.input.scalar_type();
  const bool is_in_chunks = !is_alone || norm.input_bias.defined();
  const NormPlan plan = is_in_chunks ? plan_of<plan_norm_in_chunks>(norm, offset) : plan_of(norm, offset);
  NormArguments arguments = arguments_of(norm, plan, mean, rstd);
  const at::Tensor slopes = slopes_of(norm, activation);
  set_activation(arguments, activation, slopes);
  const at::Tensor chunk_sums = scratch(norm, plan.numbers_of_chunks(2)),
                   coefficients = scratch(norm, plan.samples * plan.channels * 4),
                   sample_sums = scratch(norm, plan.samples * plan.channels * 2);
  arguments.grad = read(grad);
  arguments.out = written(grad_input);
  arguments.chunk_sums = written(chunk_sums);
  arguments.coefficients = written(coefficients);
  arguments.sample_sums = written(sample_sums);
  arguments.grad_weight = written(grad_weight);
  arguments.grad_bias = written(grad_bias);
  for (const at::Tensor* each : {&grad_weight, &grad_bias}) {
    if (each->defined()) arguments.has_float_gradients = each->scalar_type() == at::kFloat;
  }
  if (plan.is_whole() && grad_input.defined()) {
    launch({NormStep::whole_backward}, norm, arguments);
  } else {
    launch({NormStep::chunk_products, NormStep::merge_products}, norm, arguments);
    if (grad_input.defined()) launch({NormStep::gradient}, norm, arguments);
  }
  if (grad_weight.defined() || grad_bias.defined()) launch({NormStep::parameter_gradients}, norm, arguments);
}

}  // namespace nhwc::cuda
