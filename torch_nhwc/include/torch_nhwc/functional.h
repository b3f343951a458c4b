// Layers on channels-last activations, as torch_nhwc.functional has them in Python.
//
// Each function computes what PyTorch's function of the same name does. The result of a channels-last activation, and
// its gradient, have canonical channels-last strides. PyTorch's own function handles all other activations and raises
// all errors. On CPUs the work is done by our kernels or by views, as are norms on some GPUs, and otherwise on other
// devices by PyTorch's kernels. As in ops.h, the library must be loaded when a function is first called.
#pragma once

#include <array>
#include <tuple>

#include "torch_nhwc/ops.h"

namespace nhwc::functional {

using OptionalTensor = std::optional<at::Tensor>;

/// Computes group norm of an activation of 3 to 5 dimensions, for any mean as accurately as PyTorch on contiguous ones.
/// Parameters have the input's dtype, or are floats for an input of half or bfloat16.
inline at::Tensor group_norm(const at::Tensor& input, std::int64_t num_groups, const OptionalTensor& weight = {},
                             const OptionalTensor& bias = {}, double eps = 1e-5) {
  using Signature = at::Tensor(const at::Tensor&, std::int64_t, const OptionalTensor&, const OptionalTensor&, double);
  static const auto op = ops_detail::find<Signature>("nhwc::group_norm");
  return op.call(input, num_groups, weight, bias, eps);
}

/// Computes instance norm. Running statistics are updated if the input's are used, otherwise they are used themselves.
inline at::Tensor instance_norm(const at::Tensor& input, const OptionalTensor& running_mean = {},
                                const OptionalTensor& running_var = {}, const OptionalTensor& weight = {},
                                const OptionalTensor& bias = {}, bool use_input_stats = true, double momentum = 0.1,
                                double eps = 1e-5) {
  using Signature = at::Tensor(const at::Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                               const OptionalTensor&, bool, double, double);
  static const auto op = ops_detail::find<Signature>("nhwc::instance_norm");
  return op.call(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps);
}

/// Computes batch norm. In training, running statistics are updated if there are any; otherwise they are used.
inline at::Tensor batch_norm(const at::Tensor& input, const OptionalTensor& running_mean,
                             const OptionalTensor& running_var, const OptionalTensor& weight = {},
                             const OptionalTensor& bias = {}, bool training = false, double momentum = 0.1,
                             double eps = 1e-5) {
  using Signature = at::Tensor(const at::Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                               const OptionalTensor&, bool, double, double);
  static const auto op = ops_detail::find<Signature>("nhwc::batch_norm");
  return op.call(input, running_mean, running_var, weight, bias, training, momentum, eps);
}

/// Computes GELU; `approximate` is "none" or "tanh".
inline at::Tensor gelu(const at::Tensor& input, std::string_view approximate = "none") {
  using Signature = at::Tensor(const at::Tensor&, c10::string_view);
  static const auto op = ops_detail::find<Signature>("nhwc::gelu");
  return op.call(input, approximate);
}

/// Computes a linear layer, in half precision fast on every CPU.
inline at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias = {}) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&);
  static const auto op = ops_detail::find<Signature>("nhwc::linear");
  return op.call(input, weight, bias);
}

/// Computes average pooling of volumes; an empty stride means the kernel's size.
inline at::Tensor avg_pool3d(const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride = {},
                             at::IntArrayRef padding = 0, bool ceil_mode = false, bool count_include_pad = true,
                             std::optional<std::int64_t> divisor_override = {}) {
  using Signature = at::Tensor(const at::Tensor&, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef, bool, bool,
                               std::optional<std::int64_t>);
  static const auto op = ops_detail::find<Signature>("nhwc::avg_pool3d");
  return op.call(input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override);
}

/// Computes average pooling of volumes to a size.
inline at::Tensor adaptive_avg_pool3d(const at::Tensor& input, at::SymIntArrayRef output_size) {
  using Signature = at::Tensor(const at::Tensor&, at::SymIntArrayRef);
  static const auto op = ops_detail::find<Signature>("nhwc::adaptive_avg_pool3d");
  return op.call(input, output_size);
}

/// Computes max pooling of volumes to a size. Returns the maxima and their indices in the volume.
inline std::tuple<at::Tensor, at::Tensor> adaptive_max_pool3d(const at::Tensor& input, at::IntArrayRef output_size) {
  using Signature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, at::IntArrayRef);
  static const auto op = ops_detail::find<Signature>("nhwc::adaptive_max_pool3d");
  return op.call(input, output_size);
}

/// Pads circularly; `pad` begins with the last dimension, two numbers for each.
inline at::Tensor pad_circular(const at::Tensor& input, at::SymIntArrayRef pad) {
  using Signature = at::Tensor(const at::Tensor&, at::SymIntArrayRef);
  static const auto op = ops_detail::find<Signature>("nhwc::pad_circular");
  return op.call(input, pad);
}

/// Pads by "reflect", "replicate" or "circular"; `pad` begins with the last dimension, two numbers for each.
inline at::Tensor pad(const at::Tensor& input, at::SymIntArrayRef pad, c10::string_view mode) {
  using Signature = at::Tensor(const at::Tensor&, at::SymIntArrayRef, c10::string_view);
  static const auto op = ops_detail::find<Signature>("nhwc::pad");
  return op.call(input, pad, mode);
}

/// Interpolates by "nearest", "nearest-exact", "bilinear" or "trilinear" to a size, or by a factor for each dimension.
inline at::Tensor interpolate(const at::Tensor& input, at::OptionalSymIntArrayRef size,
                              std::optional<at::ArrayRef<double>> scale_factors, c10::string_view mode = "nearest",
                              bool align_corners = false) {
  using Signature = at::Tensor(const at::Tensor&, at::OptionalSymIntArrayRef, std::optional<at::ArrayRef<double>>,
                               c10::string_view, bool);
  static const auto op = ops_detail::find<Signature>("nhwc::interpolate");
  return op.call(input, size, scale_factors, mode, align_corners);
}

namespace detail {

using Convolution = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, at::SymIntArrayRef,
                               at::SymIntArrayRef, at::SymIntArrayRef, c10::SymInt);

}  // namespace detail

/// Convolves images. The numbers are right for every shape, half precision is fast on every CPU.
inline at::Tensor conv2d(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias = {},
                         at::SymIntArrayRef stride = std::array<c10::SymInt, 2>{1, 1},
                         at::SymIntArrayRef padding = std::array<c10::SymInt, 2>{0, 0},
                         at::SymIntArrayRef dilation = std::array<c10::SymInt, 2>{1, 1}, c10::SymInt groups = 1) {
  static const auto op = ops_detail::find<detail::Convolution>("nhwc::conv2d");
  return op.call(input, weight, bias, stride, padding, dilation, std::move(groups));
}

/// Convolves volumes, as `conv2d` does images. A contiguous volume takes the format of a channels-last weight.
inline at::Tensor conv3d(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias = {},
                         at::SymIntArrayRef stride = std::array<c10::SymInt, 3>{1, 1, 1},
                         at::SymIntArrayRef padding = std::array<c10::SymInt, 3>{0, 0, 0},
                         at::SymIntArrayRef dilation = std::array<c10::SymInt, 3>{1, 1, 1}, c10::SymInt groups = 1) {
  static const auto op = ops_detail::find<detail::Convolution>("nhwc::conv3d");
  return op.call(input, weight, bias, stride, padding, dilation, std::move(groups));
}

}  // namespace nhwc::functional
