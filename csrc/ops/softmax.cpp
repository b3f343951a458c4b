// Softmax over the channels of channels-last activations: PyTorch's own, whose results are contiguous.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "layout/channels_last.h"
#include "ops/composition.h"

namespace nhwc {
namespace {

using Function = at::Tensor(const at::Tensor&, int64_t, std::optional<at::ScalarType>);

template <Function& function>
at::Tensor over_channels(const at::Tensor& input, int64_t dim, std::optional<at::ScalarType> dtype) {
  const bool is_over_channels = dim == 1 || dim == 1 - input.dim();
  if (input.dim() < 4 || !is_over_channels || !is_channels_last(input)) return function(input, dim, dtype);
  const at::Tensor volume = with_channels_last_grad(input);
  // PyTorch is fastest over a last dimension, unless that is short: in half precision, shorter than a register of
  // AVX-512, which takes 3 to 7 times as long as PyTorch's loop over channels.
  const bool is_half = at::isReducedFloatingType(dtype.value_or(input.scalar_type()));
  const bool is_long = input.sym_size(1) >= (is_half ? 32 : 16);
  return as_channels_last_output(is_long ? channels_from_end(function(channels_to_end(volume), -1, dtype))
                                         : function(volume, 1, dtype));
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) {
  m.impl("softmax", TORCH_FN(over_channels<at::softmax>));
  m.impl("log_softmax", TORCH_FN(over_channels<at::log_softmax>));
}
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) {
  m.impl("softmax", TORCH_FN(over_channels<at::softmax>));
  m.impl("log_softmax", TORCH_FN(over_channels<at::log_softmax>));
}

}  // namespace nhwc
