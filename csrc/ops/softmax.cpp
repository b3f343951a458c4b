// Softmax and log-softmax over the channels of a channels-last activation.
#include "cpu/softmax.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include "activations/channels_last.h"
#include "ops/autograd_node.h"
#include "torch_nhwc/ops.h"

namespace nhwc {
namespace {

const auto& native_softmax() {
  static const auto op = ops_detail::find<at::Tensor(const at::Tensor&, bool)>("nhwc::native_softmax");
  return op;
}

const auto& native_softmax_backward() {
  static const auto op =
      ops_detail::find<at::Tensor(const at::Tensor&, const at::Tensor&, bool)>("nhwc::native_softmax_backward");
  return op;
}

// By PyTorch's own operators, which batches and every derivative pass.
at::Tensor composed(const at::Tensor& input, bool log) {
  const at::Tensor rows = channels_to_end(input);
  return channels_from_end(log ? at::log_softmax(rows, -1) : at::softmax(rows, -1));
}

at::Tensor composed_backward(const at::Tensor& grad, const at::Tensor& output, bool log) {
  const at::Tensor gradients = channels_to_end(grad), outputs = channels_to_end(output);
  if (log) return channels_from_end(gradients - outputs.exp() * gradients.sum(-1, /*keepdim=*/true));
  const at::Tensor products = gradients * outputs;
  return channels_from_end(products - outputs * products.sum(-1, /*keepdim=*/true));
}

// For every device: rows of channels, by the kernels that PyTorch has for a last dimension.
at::Tensor softmax_rows(const at::Tensor& input, bool log) {
  const at::Tensor rows = channels_to_end(input).contiguous();
  return channels_from_end(log ? at::_log_softmax(rows, -1, false) : at::_softmax(rows, -1, false));
}

at::Tensor softmax_rows_backward(const at::Tensor& grad, const at::Tensor& output, bool log) {
  const at::Tensor gradients = channels_to_end(grad).contiguous(), outputs = channels_to_end(output).contiguous();
  const at::ScalarType type = output.scalar_type();
  return channels_from_end(log ? at::_log_softmax_backward_data(gradients, outputs, -1, type)
                               : at::_softmax_backward_data(gradients, outputs, -1, type));
}

void check(const at::Tensor& input) {
  TORCH_CHECK(input.dim() >= 3 && input.dim() <= 5 && input.numel() > 0,
              "nhwc::native_softmax: expected an input of 3 to 5 dimensions with elements, got one of shape ",
              input.sizes());
}

void check(const at::Tensor& grad, const at::Tensor& output) {
  check(output);
  TORCH_CHECK(grad.sizes() == output.sizes() && grad.scalar_type() == output.scalar_type(),
              "nhwc::native_softmax_backward: expected a gradient of shape ", output.sizes(), " and ",
              output.scalar_type(), ", as the output, got ", grad.sizes(), " and ", grad.scalar_type());
}

at::Tensor softmax_cpu(const at::Tensor& input, bool log) {
  check(input);
  if (!cpu::has_softmax(input.scalar_type(), input.size(1))) return softmax_rows(input, log);
  const at::Tensor rows = channels_to_end(input).contiguous();
  at::Tensor out = at::empty(rows.sizes(), rows.options());
  cpu::softmax(rows, out, log);
  return channels_from_end(out);
}

at::Tensor softmax_cpu_backward(const at::Tensor& grad, const at::Tensor& output, bool log) {
  check(grad, output);
  if (!cpu::has_softmax_backward(output.scalar_type())) return softmax_rows_backward(grad, output, log);
  const at::Tensor gradients = channels_to_end(grad).contiguous(), outputs = channels_to_end(output).contiguous();
  at::Tensor out = at::empty(outputs.sizes(), outputs.options());
  cpu::softmax_backward(gradients, outputs, out, log);
  return channels_from_end(out);
}

at::Tensor softmax_meta(const at::Tensor& input, bool) { return empty_channels_last(input); }
at::Tensor softmax_meta_backward(const at::Tensor&, const at::Tensor& output, bool) {
  return empty_channels_last(output);
}

const Formula softmax_formula = {
    "ChannelsLastSoftmaxBackward",
    [](const std::vector<at::Tensor>& gradients, const Formula::Context& context) -> std::vector<at::Tensor> {
      if (!gradients[0].defined() || !context.needed[0]) return {at::Tensor()};
      return {native_softmax_backward().call(gradients[0], context.saved[0], context.constants[0].toBool())};
    }};

at::Tensor softmax_autograd(c10::DispatchKeySet keys, const at::Tensor& input, bool log) {
  if (has_tangent({input})) return composed(input, log);
  at::Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = native_softmax().redispatch(keys & c10::after_autograd_keyset, input, log);
  }
  if (needs_gradient({input})) record(softmax_formula, out, {input}, {}, {log}, /*saves_output=*/true);
  return out;
}

at::Tensor softmax_autograd_backward(c10::DispatchKeySet keys, const at::Tensor& grad, const at::Tensor& output,
                                     bool log) {
  if (needs_gradient({grad, output}) || has_tangent({grad, output})) return composed_backward(grad, output, log);
  const at::AutoDispatchBelowADInplaceOrView below;
  return native_softmax_backward().redispatch(keys & c10::after_autograd_keyset, grad, output, log);
}

bool is_over_channels(const at::Tensor& input, int64_t dim, std::optional<at::ScalarType> dtype) {
  return (dim == 1 || dim == 1 - input.dim()) && at::isFloatingType(dtype.value_or(input.scalar_type())) &&
         is_channels_last(input);
}

at::Tensor softmax(const at::Tensor& input, int64_t dim, std::optional<at::ScalarType> dtype) {
  if (!is_over_channels(input, dim, dtype)) return at::softmax(input, dim, dtype);
  return native_softmax().call(input.to(dtype.value_or(input.scalar_type())), false);
}

at::Tensor log_softmax(const at::Tensor& input, int64_t dim, std::optional<at::ScalarType> dtype) {
  if (!is_over_channels(input, dim, dtype)) return at::log_softmax(input, dim, dtype);
  return native_softmax().call(input.to(dtype.value_or(input.scalar_type())), true);
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeExplicitAutograd, m) {
  m.impl("native_softmax", TORCH_FN(softmax_rows));
  m.impl("native_softmax_backward", TORCH_FN(softmax_rows_backward));
}
TORCH_LIBRARY_IMPL(nhwc, CPU, m) {
  m.impl("native_softmax", TORCH_FN(softmax_cpu));
  m.impl("native_softmax_backward", TORCH_FN(softmax_cpu_backward));
}
TORCH_LIBRARY_IMPL(nhwc, Meta, m) {
  m.impl("native_softmax", TORCH_FN(softmax_meta));
  m.impl("native_softmax_backward", TORCH_FN(softmax_meta_backward));
}
TORCH_LIBRARY_IMPL(nhwc, Autograd, m) {
  m.impl("native_softmax", TORCH_FN(softmax_autograd));
  m.impl("native_softmax_backward", TORCH_FN(softmax_autograd_backward));
}
TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) {
  m.impl("softmax", TORCH_FN(softmax));
  m.impl("log_softmax", TORCH_FN(log_softmax));
}
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) {
  m.impl("native_softmax", TORCH_FN(composed));
  m.impl("native_softmax_backward", TORCH_FN(composed_backward));
  m.impl("softmax", TORCH_FN(softmax));
  m.impl("log_softmax", TORCH_FN(log_softmax));
}

// As PyTorch's: results in float32 where nothing else is asked for, on every device but a CPU.
template <c10::DeviceType device, at::Tensor (*op)(const at::Tensor&, int64_t, std::optional<at::ScalarType>)>
at::Tensor in_float32(const at::Tensor& input, int64_t dim, std::optional<at::ScalarType> dtype) {
  const c10::impl::ExcludeDispatchKeyGuard off(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const bool is_eligible = at::autocast::is_eligible(input, device);
  return op(input, dim, is_eligible ? dtype.value_or(at::kFloat) : dtype);
}

#define NHWC_SOFTMAX_IN_FLOAT32(device)                                                  \
  TORCH_LIBRARY_IMPL(nhwc, Autocast##device, m) {                                        \
    m.impl("softmax", TORCH_FN((in_float32<c10::DeviceType::device, softmax>)));         \
    m.impl("log_softmax", TORCH_FN((in_float32<c10::DeviceType::device, log_softmax>))); \
  }
NHWC_SOFTMAX_IN_FLOAT32(CUDA)
NHWC_SOFTMAX_IN_FLOAT32(XPU)
NHWC_SOFTMAX_IN_FLOAT32(MPS)
NHWC_SOFTMAX_IN_FLOAT32(MTIA)

}  // namespace nhwc
