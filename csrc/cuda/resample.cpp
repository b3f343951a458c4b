#include "cuda/resample.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <optional>

#include "cuda/norms.h"
#include "cuda/resample_kernels.h"

namespace nhwc::cuda {
namespace {

/// Returns the type of the real numbers that are summed, or nothing where no kernel has it.
std::optional<NormType> type_of_sums(at::ScalarType type) {
  switch (c10::toRealValueType(type)) {
    case at::kFloat: return NormType::float32;
    case at::kBFloat16: return NormType::bfloat16;
    case at::kHalf: return NormType::float16;
    case at::kDouble: return NormType::float64;
    default: return std::nullopt;
  }
}

/// Returns the plan for the samples that one launch may have. A complex number is two channels.
ResamplePlan plan_of(const Resampling& resampling, const at::Tensor& input, int64_t samples, std::uint64_t addresses) {
  const bool is_complex = input.is_complex();
  const auto& [depth, height, width] = resampling.axes;
  return plan_resampling({depth, height, width}, resampling.is_transposed, samples,
                         input.size(1) * (is_complex ? 2 : 1),
                         static_cast<std::uint32_t>(input.element_size()) / (is_complex ? 2 : 1), addresses);
}

}  // namespace

bool can_resample(const Resampling& resampling, const at::Tensor& input) {
  if (input.numel() == 0 || input.is_quantized() || input.element_size() > 16) return false;
  if (!input.is_cuda() || !runs_norms(input.device())) return false;
  // Aligned by no more than an element, a row has the most vectors.
  const ResamplePlan plan = plan_of(resampling, input, input.size(0), input.element_size());
  return plan.can_launch && (plan.is_copy || type_of_sums(input.scalar_type()));
}

void resample(const Resampling& resampling, const at::Tensor& input, const at::Tensor& out) {
  const c10::cuda::CUDAGuard guard(input.device());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto* from = static_cast<const char*>(input.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  for (int64_t left = input.size(0); left > 0;) {
    const auto addresses = reinterpret_cast<std::uintptr_t>(from) | reinterpret_cast<std::uintptr_t>(to);
    const ResampleArguments arguments{plan_of(resampling, input, left, addresses), from, to};
    const NormType type = type_of_sums(input.scalar_type()).value_or(NormType::float32);
    C10_CUDA_CHECK(kernels::launch(type, arguments, stream));
    const std::uint64_t samples = arguments.plan.samples;
    from += samples * (input.numel() / input.size(0) * input.element_size());
    to += samples * (out.numel() / out.size(0) * out.element_size());
    left -= static_cast<int64_t>(samples);
  }
}

}  // namespace nhwc::cuda
