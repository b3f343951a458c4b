// Nearest upsampling of volumes that lie channels-last, as two upsamplings of planes over views.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "activations/channels_last.h"
#include "ops/composition.h"

namespace nhwc {
namespace {

at::Tensor upsample_nearest3d(const at::Tensor& input, at::OptionalSymIntArrayRef output_size,
                              std::optional<at::ArrayRef<double>> scale_factors, bool exact) {
  const auto by_torch = [&](const at::Tensor& volume) {
    return exact ? at::_upsample_nearest_exact3d_symint(volume, output_size, scale_factors)
                 : at::upsample_nearest3d_symint(volume, output_size, scale_factors);
  };
  if (input.dim() != 5 || !is_channels_last(input)) return by_torch(input);
  // Symbolic sizes are for a compiler, which fuses PyTorch's own.
  const bool is_symbolic = input.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  if (!is_composed(input) || is_symbolic) return leave(by_torch(enter(input)));
  // What PyTorch would complain about is its own to say.
  if (output_size.has_value() == scale_factors.has_value() || (output_size && output_size->size() != 3) ||
      (scale_factors && scale_factors->size() != 3)) {
    return by_torch(input);
  }
  c10::SymDimVector size;
  for (int64_t dim = 0; dim < 3; ++dim) {
    size.push_back(output_size
                       ? (*output_size)[dim]
                       : static_cast<int64_t>(static_cast<double>(input.size(dim + 2)) * (*scale_factors)[dim]));
    if (size.back() <= 0) return by_torch(input);
  }
  const auto scale = [&](size_t dim) {
    return scale_factors ? std::optional<double>((*scale_factors)[dim]) : std::nullopt;
  };
  const auto resize = [&](const at::Tensor& planes, at::SymIntArrayRef to, std::optional<double> scale_h,
                          std::optional<double> scale_w) {
    return exact ? at::_upsample_nearest_exact2d_symint(planes, to, scale_h, scale_w)
                 : at::upsample_nearest2d_symint(planes, to, scale_h, scale_w);
  };
  return separably(
      input, [&](const at::Tensor& planes) { return resize(planes, {size[1], size[2]}, scale(1), scale(2)); },
      [&](const at::Tensor& columns) {
        return resize(columns, {size[0], columns.sym_size(3)}, scale(0), std::nullopt);
      });
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { m.impl("upsample_nearest3d", TORCH_FN(upsample_nearest3d)); }
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) {
  m.impl("upsample_nearest3d", TORCH_FN(upsample_nearest3d));
}

}  // namespace nhwc
