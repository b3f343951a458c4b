// Softmax over the channels of channels-last activations: by our kernels for few channels, or by PyTorch's own, whose
// results are contiguous.
#include "cpu/softmax.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include "cpu/pages.h"
#include "layout/channels_last.h"
#include "ops/autograd_node.h"
#include "ops/composition.h"

namespace nhwc {
namespace {

constexpr bool softmax = false, log_softmax = true;

using Dtype = std::optional<at::ScalarType>;

template <bool is_log>
at::Tensor by_pytorch(const at::Tensor& input, int64_t dim, Dtype dtype) {
  return is_log ? at::log_softmax(input, dim, dtype) : at::softmax(input, dim, dtype);
}

template <bool is_log>
at::Tensor gradient(const at::Tensor& grad, const at::Tensor& output) {
  if (at::GradMode::is_enabled() || !are_plain({grad, output})) {
    const auto by_pytorch = is_log ? at::_log_softmax_backward_data : at::_softmax_backward_data;
    return channels_from_end(
        by_pytorch(channels_to_end(grad), channels_to_end(output), /*dim=*/-1, output.scalar_type()));
  }
  const at::Tensor grad_input = empty_channels_last(output);
  cpu::softmax_backward(to_channels_last(grad), to_channels_last(output), is_log, grad_input);
  return grad_input;
}

template <bool is_log>
const Formula by_kernels_formula = {
    is_log ? "NhwcLogSoftmaxBackward" : "NhwcSoftmaxBackward",
    [](const std::vector<at::Tensor>& gradients, const Formula::Context& context) -> std::vector<at::Tensor> {
      return {gradients[0].defined() ? gradient<is_log>(gradients[0], context.saved[0]) : at::Tensor()};
    }};

template <bool is_log>
at::Tensor by_kernels(const at::Tensor& input) {
  at::Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = empty_channels_last(input);
    cpu::softmax(to_channels_last(input), is_log, out);
  }
  if (needs_gradient({input})) record(by_kernels_formula<is_log>, out, {input}, {}, {}, /*saves_output=*/true);
  return out;
}

/// Returns whether our kernels compute the softmax, and faster than PyTorch over a last dimension. In half precision
/// they are for all numbers of channels that they have. In float32 they take 0.55 to 1 of its time for 16 to 31
/// channels, and 0.5 to 1.6 for 32 to 64.
bool is_for_kernels(const at::Tensor& input, at::ScalarType type) {
  if (!input.is_cpu() || !are_plain({input}) ||
      c10::impl::TorchDispatchModeTLS::any_modes_set(/*skip_infra_modes=*/false)) {
    return false;
  }
  if (type == at::kFloat) return input.size(1) < 32;
  return (type == at::kBFloat16 || type == at::kHalf) && input.size(1) <= cpu::most_softmax_channels;
}

template <bool is_log>
at::Tensor over_channels(const at::Tensor& input, int64_t dim, Dtype dtype) {
  const cpu::HugePages requested;
  const bool is_over_channels = dim == 1 || dim == 1 - input.dim();
  if (input.dim() < 4 || !is_over_channels || !is_channels_last(input)) return by_pytorch<is_log>(input, dim, dtype);
  const at::ScalarType type = dtype.value_or(input.scalar_type());
  if (is_for_kernels(input, type)) return by_kernels<is_log>(input.to(type));
  const at::Tensor volume = with_channels_last_grad(input);
  // PyTorch's own is fastest over a last dimension, unless that is short: in half precision, shorter than a register of
  // AVX-512, which takes 3 to 7 times as long as PyTorch's loop over channels.
  const bool is_long = input.sym_size(1) >= (at::isReducedFloatingType(type) ? 32 : 16);
  return as_channels_last_output(is_long ? channels_from_end(by_pytorch<is_log>(channels_to_end(volume), -1, dtype))
                                         : by_pytorch<is_log>(volume, 1, dtype));
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) {
  m.impl("softmax", TORCH_FN(over_channels<softmax>));
  m.impl("log_softmax", TORCH_FN(over_channels<log_softmax>));
}
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) {
  m.impl("softmax", TORCH_FN(over_channels<softmax>));
  m.impl("log_softmax", TORCH_FN(over_channels<log_softmax>));
}

}  // namespace nhwc
