#include "weights/filter_order.h"

#include "weights/memory_format.h"

namespace nhwc {

FilterOrder filter_order(const at::Tensor& weight) {
  if (weight.numel() == 0) return FilterOrder::either;
  const bool channels_first = weight.is_contiguous();
  const bool channels_last = weight.is_contiguous(channels_last_of(weight));
  return channels_first ? (channels_last ? FilterOrder::either : FilterOrder::channels_first)
                        : (channels_last ? FilterOrder::channels_last : FilterOrder::neither);
}

FilterShape filter_shape(const at::Tensor& weight, FilterOrder from, FilterOrder to) {
  if (from == to || from == FilterOrder::either || to == FilterOrder::either) return {weight.numel(), 1, 1};
  const int64_t channels = weight.size(1), taps = weight.numel() / (weight.size(0) * channels);
  if (from == FilterOrder::channels_last) return {weight.size(0), taps, channels};
  return {weight.size(0), channels, taps};
}

}  // namespace nhwc
