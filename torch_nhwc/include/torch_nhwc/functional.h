// Layers on channels-last activations as C++ functions, as torch_nhwc.functional has them in Python.
//
// Each computes what PyTorch's function of the same name does. An activation that is channels-last comes out
// channels-last in canonical strides, and so does its gradient; any other activation, and all bad input, is PyTorch's
// own function's. On CPUs they run by kernels of ours or by views; on other devices PyTorch's own do the work. As in
// ops.h, calls go through PyTorch's dispatcher: the library must be loaded when a function is first called.
#pragma once

#include <ATen/core/Reduction.h>

#include <array>
#include <tuple>

#include "torch_nhwc/ops.h"

namespace nhwc::functional {

using OptionalTensor = std::optional<at::Tensor>;

/// Group norm of an activation of 3 to 5 dimensions, as accurate for any mean as PyTorch's on contiguous ones.
/// Parameters are of the input's dtype, or of float for an input of half or bfloat16.
inline at::Tensor group_norm(const at::Tensor& input, std::int64_t num_groups, const OptionalTensor& weight = {},
                             const OptionalTensor& bias = {}, double eps = 1e-5) {
  using Signature = at::Tensor(const at::Tensor&, std::int64_t, const OptionalTensor&, const OptionalTensor&, double);
  static const auto op = ops_detail::find<Signature>("nhwc::group_norm");
  return op.call(input, num_groups, weight, bias, eps);
}

/// Instance norm. Running statistics are updated where the input's are used, and used where these are not.
inline at::Tensor instance_norm(const at::Tensor& input, const OptionalTensor& running_mean = {},
                                const OptionalTensor& running_var = {}, const OptionalTensor& weight = {},
                                const OptionalTensor& bias = {}, bool use_input_stats = true, double momentum = 0.1,
                                double eps = 1e-5) {
  using Signature = at::Tensor(const at::Tensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                               const OptionalTensor&, bool, double, double);
  static const auto op = ops_detail::find<Signature>("nhwc::instance_norm");
  return op.call(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps);
}

/// Softmax; over the channels, dimension 1, by many rows at once.
inline at::Tensor softmax(const at::Tensor& input, std::int64_t dim, std::optional<at::ScalarType> dtype = {}) {
  using Signature = at::Tensor(const at::Tensor&, std::int64_t, std::optional<at::ScalarType>);
  static const auto op = ops_detail::find<Signature>("nhwc::softmax");
  return op.call(input, dim, dtype);
}

/// The logarithm of `softmax`.
inline at::Tensor log_softmax(const at::Tensor& input, std::int64_t dim, std::optional<at::ScalarType> dtype = {}) {
  using Signature = at::Tensor(const at::Tensor&, std::int64_t, std::optional<at::ScalarType>);
  static const auto op = ops_detail::find<Signature>("nhwc::log_softmax");
  return op.call(input, dim, dtype);
}

/// Cross entropy over the channels, of class indices or probabilities.
inline at::Tensor cross_entropy(const at::Tensor& input, const at::Tensor& target, const OptionalTensor& weight = {},
                                std::int64_t reduction = at::Reduction::Mean, c10::SymInt ignore_index = -100,
                                double label_smoothing = 0) {
  using Signature =
      at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, std::int64_t, c10::SymInt, double);
  static const auto op = ops_detail::find<Signature>("nhwc::cross_entropy");
  return op.call(input, target, weight, reduction, std::move(ignore_index), label_smoothing);
}

/// GELU, `approximate` being "none" or "tanh".
inline at::Tensor gelu(const at::Tensor& input, std::string_view approximate = "none") {
  using Signature = at::Tensor(const at::Tensor&, c10::string_view);
  static const auto op = ops_detail::find<Signature>("nhwc::gelu");
  return op.call(input, approximate);
}

/// Average pool of volumes; an empty stride is the kernel's size.
inline at::Tensor avg_pool3d(const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride = {},
                             at::IntArrayRef padding = 0, bool ceil_mode = false, bool count_include_pad = true,
                             std::optional<std::int64_t> divisor_override = {}) {
  using Signature = at::Tensor(const at::Tensor&, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef, bool, bool,
                               std::optional<std::int64_t>);
  static const auto op = ops_detail::find<Signature>("nhwc::avg_pool3d");
  return op.call(input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override);
}

/// Average pool of volumes to a size.
inline at::Tensor adaptive_avg_pool3d(const at::Tensor& input, at::SymIntArrayRef output_size) {
  using Signature = at::Tensor(const at::Tensor&, at::SymIntArrayRef);
  static const auto op = ops_detail::find<Signature>("nhwc::adaptive_avg_pool3d");
  return op.call(input, output_size);
}

/// Max pool of volumes to a size, and where in the volume each maximum is.
inline std::tuple<at::Tensor, at::Tensor> adaptive_max_pool3d(const at::Tensor& input, at::IntArrayRef output_size) {
  using Signature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, at::IntArrayRef);
  static const auto op = ops_detail::find<Signature>("nhwc::adaptive_max_pool3d");
  return op.call(input, output_size);
}

/// Power average pool of volumes; an empty stride is the kernel's size.
inline at::Tensor lp_pool3d(const at::Tensor& input, double norm_type, at::IntArrayRef kernel_size,
                            at::IntArrayRef stride = {}, bool ceil_mode = false) {
  using Signature = at::Tensor(const at::Tensor&, double, at::IntArrayRef, at::IntArrayRef, bool);
  static const auto op = ops_detail::find<Signature>("nhwc::lp_pool3d");
  return op.call(input, norm_type, kernel_size, stride, ceil_mode);
}

/// Circular padding; `pad` begins with the last dimension, two numbers for each.
inline at::Tensor pad_circular(const at::Tensor& input, at::SymIntArrayRef pad) {
  using Signature = at::Tensor(const at::Tensor&, at::SymIntArrayRef);
  static const auto op = ops_detail::find<Signature>("nhwc::pad_circular");
  return op.call(input, pad);
}

/// A convolution of volumes; one of one tap in the plane as a 2D convolution.
inline at::Tensor conv3d(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias = {},
                         at::SymIntArrayRef stride = std::array<c10::SymInt, 3>{1, 1, 1},
                         at::SymIntArrayRef padding = std::array<c10::SymInt, 3>{0, 0, 0},
                         at::SymIntArrayRef dilation = std::array<c10::SymInt, 3>{1, 1, 1}, c10::SymInt groups = 1) {
  using Signature = at::Tensor(const at::Tensor&, const at::Tensor&, const OptionalTensor&, at::SymIntArrayRef,
                               at::SymIntArrayRef, at::SymIntArrayRef, c10::SymInt);
  static const auto op = ops_detail::find<Signature>("nhwc::conv3d");
  return op.call(input, weight, bias, stride, padding, dilation, std::move(groups));
}

}  // namespace nhwc::functional
