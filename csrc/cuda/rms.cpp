#include "cuda/rms.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <initializer_list>
#include <optional>

#include "cuda/norm_kernels.h"
#include "cuda/norms.h"
#include "cuda/rms_kernels.h"

namespace nhwc::cuda {
namespace {

std::optional<NormType> rms_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return NormType::float32;
    case at::kBFloat16: return NormType::bfloat16;
    case at::kHalf: return NormType::float16;
    case at::kDouble: return NormType::float64;
    default: return std::nullopt;
  }
}

const void* rms_source(const at::Tensor& tensor) { return tensor.defined() ? tensor.const_data_ptr() : nullptr; }
void* rms_target(const at::Tensor& tensor) { return tensor.defined() ? tensor.mutable_data_ptr() : nullptr; }

RmsPlan plan_of(const ChannelRms& rms, NormType type, std::uint64_t addresses) {
  int processors = 0;
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, rms.input.device().index()));
  const std::int64_t channels = rms.input.size(1);
  return plan_rms(rms.input.numel() / channels, static_cast<std::uint32_t>(channels), type, addresses, rms.has_silu,
                  static_cast<std::uint32_t>(processors));
}

RmsArguments arguments_of(const ChannelRms& rms, const at::Tensor& grad, const at::Tensor& out) {
  RmsArguments arguments{{},
                         rms_source(rms.input),
                         rms_source(grad),
                         rms_source(rms.weight),
                         rms_source(rms.bias),
                         rms_target(out),
                         nullptr,
                         rms.scale,
                         rms.eps,
                         rms_source(rms.input_bias)};
  std::uintptr_t addresses = 0;
  for (const void* each : {arguments.input, arguments.grad, arguments.weight, arguments.bias,
                           static_cast<const void*>(arguments.out), arguments.input_bias}) {
    addresses |= reinterpret_cast<std::uintptr_t>(each);
  }
  arguments.plan = plan_of(rms, *rms_type(rms.input.scalar_type()), addresses);
  return arguments;
}

void launch(bool is_backward, const ChannelRms& rms, const RmsArguments& arguments) {
  C10_CUDA_CHECK(kernels::launch(is_backward, *rms_type(rms.input.scalar_type()), rms.has_silu, arguments,
                                 c10::cuda::getCurrentCUDAStream()));
}

}  // namespace

bool can_run(const ChannelRms& rms) {
  const std::optional<NormType> type = rms_type(rms.input.scalar_type());
  constexpr std::int64_t most_channels = 1 << 24;
  if (!type || !rms.input.is_cuda() || rms.input.numel() == 0 || rms.input.size(1) > most_channels) return false;
  // By elements a row has as many threads as it can have.
  return runs_norms(rms.input.device()) && plan_of(rms, *type, 1).can_launch();
}

void channel_rms_norm(const ChannelRms& rms, const at::Tensor& out) {
  const c10::cuda::CUDAGuard guard(rms.input.device());
  launch(/*is_backward=*/false, rms, arguments_of(rms, {}, out));
}

void channel_rms_norm_backward(const ChannelRms& rms, const at::Tensor& grad, const at::Tensor& grad_input,
                               const at::Tensor& grad_weight, const at::Tensor& grad_bias) {
  const c10::cuda::CUDAGuard guard(rms.input.device());
  RmsArguments arguments = arguments_of(rms, grad, grad_input);
  at::Tensor sums;
  if (grad_weight.defined() || grad_bias.defined()) {
    const at::ScalarType real = rms.input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    sums = at::empty({static_cast<std::int64_t>(arguments.plan.numbers_of_chunks())},
                     rms.input.options().dtype(real).memory_format(std::nullopt));
    arguments.sums = rms_target(sums);
  }
  launch(/*is_backward=*/true, rms, arguments);
  if (!sums.defined()) return;
  C10_CUDA_CHECK(kernels::launch(NormStep::parameter_gradients, *rms_type(rms.input.scalar_type()),
                                 arguments_of_sums(arguments, rms_target(grad_weight), rms_target(grad_bias)),
                                 c10::cuda::getCurrentCUDAStream()));
}

}  // namespace nhwc::cuda
