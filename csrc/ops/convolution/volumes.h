// Ways of volumes that PyTorch computes slowly, or in another format.
#pragma once

#include "ops/convolution/call.h"

namespace nhwc::volumes {

/// A kernel of one tap: one matrix product over all voxels, which is faster than a convolution except for narrow types.
bool is_linear(const Call& call);
at::Tensor linear(const Call& call);

/// A kernel with one tap in the plane: a 2D convolution over a view. Kernels with more, or a stride there, gain
/// nothing.
bool has_one_tap_in_the_plane(const Call& call);
at::Tensor along_depth(const Call& call);

/// A sample with few positions and a large weight, which oneDNN and PyTorch copy: one matrix product of the windows of
/// the kernel, gathered into rows, and of the weight as it stands.
bool has_few_positions(const Call& call);
at::Tensor gathered(const Call& call);

/// A sample that PyTorch would not give to oneDNN: it is computed as a batch of slabs, with as much of the next one as
/// the kernel reaches.
bool gains_from_slabs(const Call& call);
at::Tensor in_slabs(const Call& call);

}  // namespace nhwc::volumes
