#include "layout/memory_format.h"

#include <algorithm>

namespace nhwc {

Strides canonical_strides(at::IntArrayRef size, at::MemoryFormat memory_format) {
  Strides strides(size.size());
  int64_t stride = 1;
  if (memory_format == at::MemoryFormat::Contiguous) {
    for (size_t d = size.size(); d-- > 0; stride *= std::max<int64_t>(size[d], 1)) strides[d] = stride;
    return strides;
  }
  strides[1] = stride;
  stride = size[1];
  for (size_t d = size.size() - 1; d > 1; stride *= size[d--]) strides[d] = stride;
  strides[0] = stride;
  return strides;
}

bool is_in_format(const at::Tensor& weight, at::MemoryFormat memory_format) {
  return weight.strides() == at::IntArrayRef(canonical_strides(weight.sizes(), memory_format));
}

at::MemoryFormat channels_last_of(const at::Tensor& weight) {
  return weight.dim() == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
}

bool is_non_overlapping(at::IntArrayRef size, at::IntArrayRef strides) {
  Strides dims;
  for (size_t d = 0; d < size.size(); ++d) {
    if (size[d] == 0) return true;
    if (size[d] > 1) dims.push_back(static_cast<int64_t>(d));
  }
  std::sort(dims.begin(), dims.end(), [&](int64_t a, int64_t b) { return strides[a] < strides[b]; });
  int64_t span = 1;  // of the dimensions so far, in elements
  for (const int64_t d : dims) {
    if (strides[d] < span) return false;
    span += strides[d] * (size[d] - 1);
  }
  return true;
}

bool are_same_places(const at::Tensor& tensor, at::IntArrayRef strides) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && tensor.stride(d) != strides[d]) return false;
  }
  return true;
}

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
