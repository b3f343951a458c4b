#include "cuda/depthwise.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "cuda/depthwise_kernels.h"
#include "cuda/norms.h"

namespace nhwc::cuda {
namespace {

NormType depthwise_type(at::ScalarType type) {
  return type == at::kFloat ? NormType::float32 : type == at::kBFloat16 ? NormType::bfloat16 : NormType::float16;
}

/// Returns the arguments of a convolution from one activation to another. Pointers are those that the kernel takes
/// vectors from.
DepthwiseArguments arguments_of(const Depthwise& convolution, const at::Tensor& from, const at::Tensor& to,
                                const std::array<int64_t, 3>& padding, std::initializer_list<const void*> pointers) {
  DepthwiseArguments arguments{};
  DepthwisePlan& plan = arguments.plan;
  plan.samples = static_cast<std::uint32_t>(from.size(0));
  plan.channels = static_cast<std::uint32_t>(from.size(1));
  for (int64_t axis = 0; axis < 3; ++axis) {
    plan.input[axis] = static_cast<std::int32_t>(from.size(axis + 2));
    plan.output[axis] = static_cast<std::int32_t>(to.size(axis + 2));
    plan.kernel[axis] = static_cast<std::int32_t>(convolution.weight.size(axis + 2));
    plan.stride[axis] = static_cast<std::int32_t>(convolution.stride[axis]);
    plan.padding[axis] = static_cast<std::int32_t>(padding[axis]);
  }
  const auto bytes = static_cast<std::uintptr_t>(depthwise_lanes * from.element_size());
  int processors = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, from.device().index()));
  plan_depthwise(
      plan,
      std::all_of(pointers.begin(), pointers.end(),
                  [&](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0; }),
      static_cast<std::uint32_t>(processors));
  return arguments;
}

void launch(std::initializer_list<DepthwiseStep> steps, const at::Tensor& like, const DepthwiseArguments& arguments) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  for (const DepthwiseStep step : steps) {
    C10_CUDA_CHECK(kernels::launch(step, depthwise_type(like.scalar_type()), arguments, stream));
  }
}

void convolve(const Depthwise& convolution, const at::Tensor& from, const at::Tensor& bias, const at::Tensor& to,
              const std::array<int64_t, 3>& padding, bool is_flipped) {
  const c10::cuda::CUDAGuard guard(from.device());
  const void* input = from.const_data_ptr();
  void* out = to.mutable_data_ptr();
  DepthwiseArguments arguments = arguments_of(convolution, from, to, padding, {input, out});
  arguments.input = input;
  arguments.weight = convolution.weight.const_data_ptr();
  arguments.bias = bias.defined() ? bias.const_data_ptr() : nullptr;
  arguments.out = out;
  arguments.is_flipped = is_flipped;
  launch({DepthwiseStep::convolve}, from, arguments);
}

}  // namespace

bool can_run(const Depthwise& convolution, const at::Tensor& input) {
  const at::ScalarType type = input.scalar_type();
  if (type != at::kFloat && type != at::kBFloat16 && type != at::kHalf) return false;
  const at::Tensor& weight = convolution.weight;
  if (weight.size(0) != input.size(1) || weight.size(4) < 3 || weight.size(4) % 2 == 0) return false;
  int64_t elements = input.size(0) * input.size(1);  // of the larger activation, which padding may make the output
  for (int64_t axis = 0; axis < 3; ++axis) {
    const int64_t taps = weight.size(axis + 2), stride = convolution.stride[axis], pad = convolution.padding[axis];
    if (taps > most_taps || stride > 2 || convolution.dilation[axis] != 1) return false;
    if (input.size(axis + 2) >= 1 << 16 || pad >= 1 << 16) return false;
    elements *= input.size(axis + 2) + 2 * pad;
    if (elements > std::numeric_limits<std::int32_t>::max()) return false;
  }
  return elements > 0 && runs_norms(input.device());
}

void depthwise_forward(const Depthwise& convolution, const at::Tensor& input, const at::Tensor& bias,
                       const at::Tensor& out) {
  convolve(convolution, input, bias, out, convolution.padding, /*is_flipped=*/false);
}

void depthwise_input_gradient(const Depthwise& convolution, const at::Tensor& grad, const at::Tensor& grad_input) {
  std::array<int64_t, 3> padding;
  for (size_t axis = 0; axis < 3; ++axis) {
    padding[axis] = convolution.weight.size(static_cast<int64_t>(axis) + 2) - 1 - convolution.padding[axis];
  }
  convolve(convolution, grad, {}, grad_input, padding, /*is_flipped=*/true);
}

void depthwise_weight_gradient(const Depthwise& convolution, const at::Tensor& grad, const at::Tensor& input,
                               const at::Tensor& grad_weight) {
  const c10::cuda::CUDAGuard guard(input.device());
  const void *from = input.const_data_ptr(), *by = grad.const_data_ptr();
  DepthwiseArguments arguments = arguments_of(convolution, input, grad, convolution.padding, {from, by});
  const DepthwisePlan& plan = arguments.plan;
  const auto count = std::int64_t{plan.chunks} * plan.taps() * plan.channels;
  const at::Tensor sums = at::empty({count}, input.options().dtype(at::kFloat).memory_format(std::nullopt));
  arguments.input = from;
  arguments.grad = by;
  arguments.sums = sums.mutable_data_ptr<float>();
  arguments.out = grad_weight.mutable_data_ptr();
  launch({DepthwiseStep::chunk_gradients, DepthwiseStep::merge_gradients}, input, arguments);
}

}  // namespace nhwc::cuda
