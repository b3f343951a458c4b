// Operators that are compositions of PyTorch's, over views of a channels-last activation.
#pragma once

#include <ATen/core/Tensor.h>

namespace nhwc {

/// Returns whether our kernels may read these tensors: they are plain ones, or a compiler's where it records operators
/// of ours. Transforms, subclasses, tangents, and tensors whose memory has other values get a composition.
bool are_plain(at::ArrayRef<at::Tensor> tensors, bool is_compiled = false);

/// Returns whether a composition may be computed below autograd, on memory that nobody else sees, with a derivative of
/// our own: the tensors are plain ones, and no mode observes the operators.
bool is_unobserved(at::ArrayRef<at::Tensor> tensors);

/// Returns the memory of a dense activation as a tensor of other sizes, without a history: no view for autograd, and
/// no call of the dispatcher.
at::Tensor memory_of(const at::Tensor& dense, at::IntArrayRef sizes);

/// Returns a tensor of the same sizes and strides in another dtype, whose elements do not exist: to ask what PyTorch
/// would do with one.
at::Tensor without_memory(const at::Tensor& like, at::ScalarType dtype);

/// Gives a new tensor the sizes, and the canonical channels-last strides, of its memory's order.
at::Tensor as_new_channels_last(at::Tensor memory, at::IntArrayRef sizes);

/// Returns the activation in canonical channels-last strides; itself if it has them.
at::Tensor to_channels_last(const at::Tensor& input);

/// Returns the tensor in canonical contiguous strides.
at::Tensor to_contiguous(const at::Tensor& input);

/// Returns a view of canonical strides in the input's own order, or a copy of an input that is not dense.
at::Tensor with_canonical_strides(const at::Tensor& input);

/// Returns an alias of a composition's input through which the gradient flows in channels-last strides.
at::Tensor with_channels_last_grad(const at::Tensor& input);

/// Returns an alias of a composition's weight through which the gradient flows in the weight's strides, where these are
/// channels-last or contiguous.
at::Tensor with_same_layout_grad(const at::Tensor& weight);

/// Returns the output of a composition, new memory, in canonical strides. It is not a view for autograd, with or
/// without a gradient: in-place changes of views cost copies in the backward, and PyTorch refuses some of views that
/// were made without a gradient. The composition receives its gradient in channels-last strides.
at::Tensor as_channels_last_output(const at::Tensor& output);

/// Returns whether the composition is for this tensor. On other devices PyTorch's own operator runs, and its result is
/// converted to the format.
inline bool is_composed(const at::Tensor& input) { return input.device().is_cpu(); }

/// Views of a volume `[N, C, D, H, W]` as `[N * D, C, H, W]` and as `[N, C, D, H * W]`, and their inverses.
at::Tensor to_planes(const at::Tensor& volume);
at::Tensor from_planes(const at::Tensor& planes, const c10::SymInt& samples);
at::Tensor to_columns(const at::Tensor& volume);
at::Tensor from_columns(const at::Tensor& columns, const c10::SymInt& width);

}  // namespace nhwc
