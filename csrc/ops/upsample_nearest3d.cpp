// Nearest upsampling of channels-last volumes: PyTorch's own, with the gradient converted back to the format.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "layout/channels_last.h"
#include "ops/composition.h"

namespace nhwc {
namespace {

at::Tensor upsample_nearest3d(const at::Tensor& input, at::OptionalSymIntArrayRef output_size,
                              std::optional<at::ArrayRef<double>> scale_factors, bool exact) {
  const auto upsample = [&](const at::Tensor& volume) {
    return exact ? at::_upsample_nearest_exact3d_symint(volume, output_size, scale_factors)
                 : at::upsample_nearest3d_symint(volume, output_size, scale_factors);
  };
  return input.dim() == 5 && is_channels_last(input) ? as_channels_last_output(upsample(with_channels_last_grad(input)))
                                                     : upsample(input);
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { m.impl("upsample_nearest3d", TORCH_FN(upsample_nearest3d)); }
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) {
  m.impl("upsample_nearest3d", TORCH_FN(upsample_nearest3d));
}

}  // namespace nhwc
