// Memory formats of weights: as strides, and as the order in which their filters lie in memory.
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

/// Whether other strides mean the same places for all elements: they differ where a size is 1, if anywhere.
bool are_same_places(const at::Tensor& tensor, at::IntArrayRef strides);

/// How the filters of a weight lie in memory.
enum class FilterOrder {
  channels_first,  ///< each filter is a dense I x K matrix
  channels_last,   ///< each filter is a dense K x I matrix
  either,          ///< both at once: one tap, one channel, or nothing at all
  neither,         ///< any other strides
};
FilterOrder filter_order(const at::Tensor& weight);

/// channels_last for channels_first and the reverse.
inline FilterOrder other_order(FilterOrder order) {
  return order == FilterOrder::channels_last ? FilterOrder::channels_first : FilterOrder::channels_last;
}

/// A weight as the kernels see it: `filters` row-major matrices.
struct FilterShape {
  int64_t filters, rows, columns;
};

/// The matrices that go from one order to the other; where nothing moves, elements one by one.
FilterShape filter_shape(const at::Tensor& weight, FilterOrder from, FilterOrder to);

}  // namespace nhwc
