// Operators that are composed of PyTorch's own, over views of a channels-last activation.
#pragma once

#include <ATen/core/Tensor.h>

namespace nhwc {

/// An input of a composition: the same memory, and the gradient that it hands on lies channels-last.
at::Tensor enter(const at::Tensor& input);

/// A weight of a composition: the same memory, and the gradient that it hands on has its strides, where it is
/// channels-last or contiguous.
at::Tensor enter_weight(const at::Tensor& weight);

/// The output of a composition, in canonical strides. It is no view for autograd, since changing a view in place costs
/// copies in the backward; and the composition is given its gradient in channels-last.
at::Tensor leave(const at::Tensor& output);

/// `planes` on the `[N * D, C, H, W]` of a volume `[N, C, D, H, W]`, then `columns` on `[N, C, D, H * W]`: all that is
/// a product of what happens in a plane and what happens along depth. Views throughout.
template <typename Planes, typename Columns>
at::Tensor separably(const at::Tensor& input, const Planes& planes, const Columns& columns);

/// Whether the composition is for this tensor. Other devices take PyTorch's own operator, and its result's format is
/// brought in order.
inline bool is_composed(const at::Tensor& input) { return input.device().is_cpu(); }

/// The views of `separably`, there and back.
at::Tensor to_planes(const at::Tensor& volume);
at::Tensor from_planes(const at::Tensor& planes, const c10::SymInt& samples);
at::Tensor to_columns(const at::Tensor& volume);
at::Tensor from_columns(const at::Tensor& columns, const c10::SymInt& width);

template <typename Planes, typename Columns>
at::Tensor separably(const at::Tensor& input, const Planes& planes, const Columns& columns) {
  const at::Tensor volume = from_planes(planes(to_planes(enter(input))), input.sym_size(0));
  return leave(from_columns(columns(to_columns(volume)), volume.sym_size(4)));
}

}  // namespace nhwc
