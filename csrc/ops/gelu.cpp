// GELU of a channels-last activation: PyTorch's own, over its memory in order.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <vector>

#include "cpu/pages.h"
#include "layout/channels_last.h"
#include "ops/autograd_node.h"
#include "ops/composition.h"

namespace nhwc {
namespace {

/// Returns what PyTorch's operators take of a dense activation. Of a contiguous tensor oneDNN computes them, which is
/// faster from about so many elements on; before, its call takes longer than PyTorch's own loop over these strides.
at::Tensor operand(const at::Tensor& dense) {
  constexpr int64_t fewest_for_onednn = 20000;
  return dense.numel() < fewest_for_onednn ? dense : memory_of(dense, {dense.numel()});
}

const Formula formula = {
    "NhwcGeluBackward",
    [](const std::vector<at::Tensor>& gradients, const Formula::Context& context) -> std::vector<at::Tensor> {
      const at::Tensor &grad = gradients[0], &input = context.saved[0];
      if (!grad.defined() || !context.needed[0]) return {at::Tensor()};
      const char* approximate = context.constants[0].toBool() ? "tanh" : "none";
      if (at::GradMode::is_enabled() || !is_unobserved({grad, input})) {
        return {to_channels_last(at::gelu_backward(grad, input, approximate))};
      }
      const at::Tensor out =
          at::gelu_backward(operand(to_channels_last(grad)), operand(to_channels_last(input.detach())), approximate);
      return {as_new_channels_last(out, input.sizes())};
    }};

at::Tensor gelu(const at::Tensor& input, c10::string_view approximate) {
  const cpu::HugePages requested;
  if (!is_channels_last(input)) return at::gelu(input, approximate);
  if (!is_composed(input) || !is_unobserved(input)) {
    return as_channels_last_output(
        channels_from_end(at::gelu(channels_to_end(with_channels_last_grad(input)), approximate)));
  }
  at::Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = as_new_channels_last(at::gelu(operand(to_channels_last(input)), approximate), input.sizes());
  }
  if (needs_gradient(input)) record(formula, out, input, input, {approximate == "tanh"});
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { m.impl("gelu", TORCH_FN(gelu)); }
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) { m.impl("gelu", TORCH_FN(gelu)); }

}  // namespace nhwc
