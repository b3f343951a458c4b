// GELU of a channels-last activation: PyTorch's own, on the dense view whose last dimension is the channels.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "layout/channels_last.h"
#include "ops/composition.h"

namespace nhwc {
namespace {

at::Tensor gelu(const at::Tensor& input, c10::string_view approximate) {
  if (!is_channels_last(input)) return at::gelu(input, approximate);
  return as_channels_last_output(
      channels_from_end(at::gelu(channels_to_end(with_channels_last_grad(input)), approximate)));
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { m.impl("gelu", TORCH_FN(gelu)); }
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) { m.impl("gelu", TORCH_FN(gelu)); }

}  // namespace nhwc
