// 3D convolutions of channels-last volumes with one tap in the plane: 2D convolutions over views, or matrix products
// where depth has one tap too. Kernels with more taps in the plane, or a stride there, gain nothing and are PyTorch's.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "layout/channels_last.h"
#include "ops/composition.h"

namespace nhwc {
namespace {

// Returns whether the arguments fit each other and the composition is faster. PyTorch's own operator handles everything
// else, errors included.
bool is_composable(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                   at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef dilation,
                   const c10::SymInt& groups) {
  if (input.dim() != 5 || weight.dim() != 5 || !is_channels_last(input) || !is_composed(input)) return false;
  if (stride.size() != 3 || padding.size() != 3 || dilation.size() != 3) return false;
  for (size_t dim = 0; dim < 3; ++dim) {
    const c10::SymInt reach = dilation[dim] * (weight.sym_size(dim + 2) - 1);
    if (stride[dim] <= 0 || padding[dim] < 0 || dilation[dim] <= 0 || weight.sym_size(dim + 2) <= 0 ||
        input.sym_size(dim + 2) + 2 * padding[dim] <= reach) {
      return false;
    }
  }
  for (size_t dim = 1; dim < 3; ++dim) {
    if (weight.sym_size(dim + 2) != 1 || padding[dim] != 0 || stride[dim] != 1) return false;
  }
  // With groups, only these cases were faster when measured.
  if (groups > 1 && (weight.sym_size(2) != 1 || input.scalar_type() != at::kFloat)) return false;
  if (groups <= 0 || weight.sym_size(0) <= 0 || weight.sym_size(0) % groups != 0 ||
      input.sym_size(1) != weight.sym_size(1) * groups || input.scalar_type() != weight.scalar_type()) {
    return false;
  }
  const bool has_bias = bias && bias->defined();
  return !has_bias ||
         (bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0) && bias->scalar_type() == input.scalar_type());
}

// Returns whether the convolution is one matrix product over all voxels, which is faster than a convolution except for
// narrow types, and is as precise as PyTorch's settings require of convolutions.
bool is_linear(const at::Tensor& input, const at::Tensor& weight, const c10::SymInt& stride, const c10::SymInt& padding,
               const c10::SymInt& groups) {
  const bool is_wide = input.scalar_type() == at::kFloat || input.scalar_type() == at::kDouble;
  if (!is_wide || weight.sym_size(2) != 1 || stride != 1 || padding != 0 || groups != 1) return false;
  const auto precision = [](at::Float32Op op) {
    return at::globalContext().float32Precision(at::Float32Backend::MKLDNN, op);
  };
  return precision(at::Float32Op::MATMUL) == precision(at::Float32Op::CONV);
}

at::Tensor conv3d(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef dilation,
                  c10::SymInt groups) {
  if (!is_composable(input, weight, bias, stride, padding, dilation, groups)) {
    if (input.dim() != 5 || !is_channels_last(input)) {
      return at::conv3d_symint(input, weight, bias, stride, padding, dilation, std::move(groups));
    }
    return as_channels_last_output(
        at::conv3d_symint(with_channels_last_grad(input), weight, bias, stride, padding, dilation, std::move(groups)));
  }
  const at::Tensor kernel = with_same_layout_grad(weight);  // its views may get gradients in other strides
  if (is_linear(input, weight, stride[0], padding[0], groups)) {
    return as_channels_last_output(
        channels_from_end(at::linear(channels_to_end(with_channels_last_grad(input)), kernel.flatten(1), bias)));
  }
  const c10::SymInt one = 1, zero = 0;
  const at::Tensor out = at::conv2d_symint(to_columns(with_channels_last_grad(input)), kernel.squeeze(4), bias,
                                           at::SymIntArrayRef({stride[0], one}), at::SymIntArrayRef({padding[0], zero}),
                                           at::SymIntArrayRef({dilation[0], one}), groups);
  return as_channels_last_output(from_columns(out, input.sym_size(4)));
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { m.impl("conv3d", TORCH_FN(conv3d)); }
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) { m.impl("conv3d", TORCH_FN(conv3d)); }

// In lower precision, as PyTorch's. The casts precede the views, whose casts autocast would not cache. On other devices
// PyTorch's own operator is called.
TORCH_LIBRARY_IMPL(nhwc, AutocastCPU, m) {
  m.impl("conv3d",
         [](const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
            at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef dilation, c10::SymInt groups) {
           const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastCPU);
           const auto lower = [](const auto& tensor) {
             return at::autocast::cached_cast(at::autocast::get_lower_precision_fp_from_device_type(at::kCPU), tensor,
                                              at::kCPU);
           };
           return nhwc::conv3d(lower(input), lower(weight), lower(bias), stride, padding, dilation, std::move(groups));
         });
}

}  // namespace nhwc
