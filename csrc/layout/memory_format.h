// Memory formats of weights: as strides, and as the order of their filters in memory.
#pragma once

#include <ATen/core/DimVector.h>
#include <ATen/core/Tensor.h>

namespace nhwc {

using Strides = at::DimVector;

/// Returns the strides of `at::empty(size, memory_format)`, also where a size is 0 or 1.
Strides canonical_strides(at::IntArrayRef size, at::MemoryFormat memory_format);

/// Returns whether the strides are exactly the canonical ones. `is_contiguous(memory_format)` is weaker: it ignores the
/// strides of dimensions of size 1, which decide the format of an ambiguous tensor for PyTorch.
bool is_in_format(const at::Tensor& weight, at::MemoryFormat memory_format);

/// Returns channels_last or channels_last_3d, by rank.
at::MemoryFormat channels_last_of(const at::Tensor& weight);

/// Returns whether no two elements share a place. Strict: interleaved strides count as overlapping.
bool is_non_overlapping(at::IntArrayRef size, at::IntArrayRef strides);

/// Returns whether all elements have the same places by these strides, which may then differ where a size is 1.
bool are_same_places(const at::Tensor& tensor, at::IntArrayRef strides);

/// The order of a weight's filters in memory.
enum class FilterOrder {
  channels_first,  ///< each filter is a dense I x K matrix
  channels_last,   ///< each filter is a dense K x I matrix
  either,          ///< both at once: one tap, one channel, or nothing at all
  neither,         ///< any other strides
};
FilterOrder filter_order(const at::Tensor& weight);

/// Returns channels_last for channels_first, and the reverse.
inline FilterOrder other_order(FilterOrder order) {
  return order == FilterOrder::channels_last ? FilterOrder::channels_first : FilterOrder::channels_last;
}

/// A weight in the form of the kernels: `filters` row-major matrices.
struct FilterShape {
  int64_t filters, rows, columns;
};

/// Returns the matrices whose transposes convert one order to the other; single elements where nothing moves.
FilterShape filter_shape(const at::Tensor& weight, FilterOrder from, FilterOrder to);

}  // namespace nhwc
