// Activations in channels-last, and their view with the channels as last dimension.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace nhwc {

/// Returns whether an activation `[N, C, *spatial]` of 3 to 5 dimensions is channels-last, dense or as a part of a
/// larger tensor. An ambiguous one is if its strides are the canonical ones of channels-last and not of contiguous.
///
/// In 3 dimensions, for which PyTorch has no such format, the strides are `(C * L, 1, C)`.
bool is_channels_last(const at::Tensor& input);

/// Returns whether an activation has the canonical strides of channels-last; an ambiguous one may be contiguous as
/// well.
bool has_channels_last_strides(const at::Tensor& input);

/// Returns the view `[N, *spatial, C]`, which is contiguous where the activation is dense and channels-last.
inline at::Tensor channels_to_end(const at::Tensor& input) { return input.movedim(1, -1); }

/// Returns the view `[N, C, *spatial]`, channels-last, of a contiguous `[N, *spatial, C]`.
inline at::Tensor channels_from_end(const at::Tensor& input) { return input.movedim(-1, 1); }

/// Returns whether a dense activation, channels-last or contiguous, has another stride than the canonical one in some
/// dimension of size 1.
bool has_odd_strides(const at::Tensor& input);

/// Allocates a tensor like the activation, in canonical channels-last strides, and perhaps of another dtype.
at::Tensor empty_channels_last(const at::Tensor& like, std::optional<at::ScalarType> type = std::nullopt);

}  // namespace nhwc
