// Memory formats as strides: the canonical ones, and whether a weight has them.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

namespace nhwc {

using Strides = at::DimVector;

/// The strides that `at::empty(size, memory_format)` gives, also where a size is 0 or 1.
Strides canonical_strides(at::IntArrayRef size, at::MemoryFormat memory_format);

/// Whether the strides are exactly the canonical ones. `is_contiguous(memory_format)` is weaker: it overlooks the
/// strides of dimensions of size 1, by which PyTorch tells the format of an ambiguous tensor.
bool in_format(const at::Tensor& weight, at::MemoryFormat memory_format);

/// channels_last or channels_last_3d, by rank.
at::MemoryFormat channels_last_of(const at::Tensor& weight);

/// Whether no two elements lie at one place. Strict: strides that interleave without overlapping count as overlapping.
bool is_non_overlapping(at::IntArrayRef size, at::IntArrayRef strides);

}  // namespace nhwc
