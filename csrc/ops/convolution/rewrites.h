// The rows of the table that change a call and ask again, or that leave it to PyTorch.
//
// Each is a composition of PyTorch's operators, so that derivatives of any order, transforms and compilers need no
// more.
#pragma once

#include "ops/convolution/call.h"

namespace nhwc {

/// Computes a convolution by its way.
using Convolution = at::Tensor (*)(const Call& call);

}  // namespace nhwc

namespace nhwc::rewrites {

/// Returns PyTorch's result.
at::Tensor as_it_is(const Call& call, Convolution convolution);

/// Returns PyTorch's result in the format of the input.
at::Tensor restored(const Call& call, Convolution convolution);

/// Adds the dimension of samples to one sample.
at::Tensor as_batch(const Call& call, Convolution convolution);

/// Converts the input to channels-last.
at::Tensor formatted(const Call& call, Convolution convolution);

/// Computes PyTorch's result on contiguous memory, and converts it to channels-last.
at::Tensor in_contiguous(const Call& call, Convolution convolution);

/// Views the input in canonical strides.
at::Tensor restrided(const Call& call, Convolution convolution);

// What PyTorch computes wrong.

/// Narrows the input to the columns under the kernel, whose width then needs no stride.
at::Tensor narrowed(const Call& call, Convolution convolution);

/// Narrows the input to the planes under a tap.
at::Tensor trimmed(const Call& call, Convolution convolution);

/// Pads the input before.
at::Tensor padded_before(const Call& call, Convolution convolution);

/// Slices the input instead of striding over it.
at::Tensor sliced(const Call& call, Convolution convolution);

/// Adds a column to the input of a transposed convolution, and cuts it off the output.
at::Tensor widened(const Call& call, Convolution convolution);

/// Computes the output padding of a transposed convolution by itself: it adds nothing but the bias.
at::Tensor extended(const Call& call, Convolution convolution);

/// Cuts the padding of a transposed convolution off the output.
at::Tensor cut(const Call& call, Convolution convolution);

// Volumes that PyTorch computes slowly.

/// Computes a 2D convolution over a view `[N, C, D, H * W]`, for kernels with one tap in the plane.
at::Tensor along_depth(const Call& call, Convolution convolution);

/// Two: oneDNN takes any batch, and more slabs gain nothing.
constexpr int64_t slabs = 2;

/// Returns the axis that a sample is cut along, from the last one: its depth, or the height where the depth has one
/// position. The results of the slabs then lie one after the other.
int64_t axis_of_slabs(const Call& call);

/// Computes one sample as a batch: slabs of it, with as much of the next one as the kernel reaches.
at::Tensor in_slabs(const Call& call, Convolution convolution);

}  // namespace nhwc::rewrites
