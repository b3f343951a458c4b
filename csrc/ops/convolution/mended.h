// Ways that change what PyTorch computes wrong, on this machine and for these shapes, into what it computes right.
#pragma once

#include "ops/convolution/call.h"

namespace nhwc::mended {

/// The result is one column, of a strided width: the input is narrowed to the columns under the kernel, whose width
/// then needs no stride.
bool is_column(const Call& call);
at::Tensor narrowed(const Call& call);

/// The last planes of a volume of half precision are under no tap, and AMX leaves their gradient unwritten: the input
/// is narrowed to the others.
bool has_depth_under_no_tap(const Call& call);
at::Tensor trimmed(const Call& call);

/// No output position sees the whole kernel: the input is padded before.
bool is_small_input(const Call& call);
at::Tensor padded_before(const Call& call);

/// A 2D kernel of one tap strides over few channels, and its weight needs a gradient: the input is sliced.
bool is_strided_tap(const Call& call);
at::Tensor sliced(const Call& call);

/// Returns whether any of these ways applies.
bool is_needed(const Call& call);

// The same for transposed convolutions. The gradient of the input is a convolution, which may be wrong as others are.

/// The input is one column: one more is added, and cut off the output.
bool is_transposed_column(const Call& call);
at::Tensor widened(const Call& call);

/// Of a strided tap, the output padding is computed by itself: it adds nothing but the bias.
bool is_extended_tap(const Call& call);
at::Tensor extended(const Call& call);

/// No input position sees the whole kernel: the padding is cut off the output.
bool is_small_output(const Call& call);
at::Tensor cut(const Call& call);

}  // namespace nhwc::mended
