// Nearest upsampling of volumes that lie channels-last: PyTorch's own, whose gradient is brought back into the format.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "activations/channels_last.h"
#include "ops/composition.h"

namespace nhwc {
namespace {

at::Tensor upsample_nearest3d(const at::Tensor& input, at::OptionalSymIntArrayRef output_size,
                              std::optional<at::ArrayRef<double>> scale_factors, bool exact) {
  const auto upsample = [&](const at::Tensor& volume) {
    return exact ? at::_upsample_nearest_exact3d_symint(volume, output_size, scale_factors)
                 : at::upsample_nearest3d_symint(volume, output_size, scale_factors);
  };
  return input.dim() == 5 && is_channels_last(input) ? leave(upsample(enter(input))) : upsample(input);
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { m.impl("upsample_nearest3d", TORCH_FN(upsample_nearest3d)); }
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) {
  m.impl("upsample_nearest3d", TORCH_FN(upsample_nearest3d));
}

}  // namespace nhwc
