// How the filters of a weight lie in memory, and the matrices that the kernels transpose.
#pragma once

#include <ATen/core/Tensor.h>

namespace nhwc {

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
