// What PyTorch's CPU convolutions compute wrong: on which machines, and for which shapes.
#pragma once

#include "ops/convolution/call.h"

namespace nhwc {

/// The instruction sets of oneDNN that its faults and its speed depend on. One with AMX has AVX-512, too.
enum class OnednnIsa { unknown, below_avx512, avx512, amx };

/// Returns the instruction set of oneDNN on this machine, which the environment may bound.
OnednnIsa onednn_isa();

}  // namespace nhwc

/// Each returns whether oneDNN computes this call wrong on this machine. Where nothing was measured, they expect it to.
namespace nhwc::faults {

/// The result is one column, of a strided width: outputs are memory that nobody wrote. In float32 filters of one
/// channel have this fault.
bool has_one_column(const Call& call);

/// Along some axis no output position sees the whole kernel: the weight's gradient is memory that nobody wrote, or the
/// heap is damaged; more rarely another gradient, or the output. Without AVX-512, where all taps along an axis are in
/// the padding, the process ends.
bool has_small_input(const Call& call);

/// The last planes of a volume of half precision are under no tap, and AMX leaves their gradient unwritten.
bool has_depth_under_no_tap(const Call& call);

/// Returns how many planes of a volume there are up to the last one under a tap.
c10::SymInt planes_under_a_tap(const Call& call);

/// A 2D kernel of one tap strides over few channels in channels-last, and its weight needs a gradient, which is wrong,
/// or the heap is damaged.
bool has_strided_tap(const Call& call);

// The same for transposed convolutions. The gradient of the input is a convolution, which may be wrong as others are.

/// The input is one column, of a strided width.
bool has_one_transposed_column(const Call& call);

/// No input position sees the whole kernel.
bool has_small_output(const Call& call);

/// A strided tap has an output padding.
bool has_extended_tap(const Call& call);

/// Half precision: many positions of the kernel in the padding, dilated filters, and with AMX filters that are packed
/// wrong, or strides beyond the kernel.
bool is_wrong_in_half_precision(const Call& call);

}  // namespace nhwc::faults
