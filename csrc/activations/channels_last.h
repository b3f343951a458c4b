// Activations in channels-last: which they are, and their dense view with channels last.
#pragma once

#include <ATen/core/Tensor.h>

namespace nhwc {

/// Whether an activation `[N, C, *spatial]` of 3 to 5 dimensions lies channels-last, dense or as a part of a larger
/// tensor. An ambiguous one does where its strides are the canonical ones of channels-last and not those of contiguous.
///
/// Of 3 dimensions, where PyTorch has no name for it, the strides are `(C * L, 1, C)`.
bool is_channels_last(const at::Tensor& input);

/// `[N, *spatial, C]`, a view; contiguous where the activation is dense and channels-last.
inline at::Tensor channels_to_end(const at::Tensor& input) { return input.movedim(1, -1); }

/// The way back: `[N, C, *spatial]` in channels-last, a view of a contiguous `[N, *spatial, C]`.
inline at::Tensor channels_from_end(const at::Tensor& input) { return input.movedim(-1, 1); }

/// The activation in canonical channels-last strides, itself where it has them.
at::Tensor to_channels_last(const at::Tensor& input);

/// New memory of the activation's sizes and dtype in canonical channels-last strides.
at::Tensor empty_channels_last(const at::Tensor& like);

}  // namespace nhwc
