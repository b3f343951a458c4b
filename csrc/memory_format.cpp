#include "memory_format.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/MemoryFormat.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <sstream>

namespace nhwc {

at::MemoryFormat channels_last_of(const at::Tensor& weight) {
  return weight.dim() == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
}

std::ostream& operator<<(std::ostream& out, const Argument& argument) {
  out << argument.op;
  if (argument.count > 1) out << ", weight " << argument.index << " of " << argument.count;
  return out;
}

void check_strided(const Argument& argument, const at::Tensor& weight) {
  TORCH_CHECK(weight.defined(), argument, ": expected a weight, got none");
  const bool quantized = weight.is_quantized() || at::isQIntType(weight.scalar_type());
  TORCH_CHECK_NOT_IMPLEMENTED(!weight.is_nested() && !quantized && weight.layout() == at::kStrided, argument,
                              ": expected a strided weight, got ",
                              weight.is_nested() ? "a nested tensor"
                              : quantized        ? "a quantized tensor"
                                                 : "a tensor of another layout",
                              " (layout ", weight.layout(), ", dtype ", weight.scalar_type(), ")");
}

at::MemoryFormat resolve_memory_format(const Argument& argument, const at::Tensor& weight,
                                       std::optional<at::MemoryFormat> requested) {
  check_strided(argument, weight);
  TORCH_CHECK(weight.dim() == 4 || weight.dim() == 5, argument, ": expected a 4D or 5D weight, got ", weight.dim(),
              "D: ", describe(weight));
  const at::MemoryFormat format = requested.value_or(channels_last_of(weight));
  switch (format) {
    case at::MemoryFormat::Contiguous: return format;
    case at::MemoryFormat::ChannelsLast:
      TORCH_CHECK(weight.dim() == 4, argument, ": required rank 4 tensor to use channels_last format, got ",
                  describe(weight), "; channels_last_3d is the one of rank 5");
      return format;
    case at::MemoryFormat::ChannelsLast3d:
      TORCH_CHECK(weight.dim() == 5, argument, ": required rank 5 tensor to use channels_last_3d format, got ",
                  describe(weight), "; channels_last is the one of rank 4");
      return format;
    default:
      TORCH_CHECK(false, argument, ": expected contiguous_format, channels_last or channels_last_3d, got ", format);
  }
}

void check_storage(const Argument& argument, const at::Tensor& weight) {
  if (!weight.has_storage() || weight.is_meta()) return;
  const size_t needed = at::detail::computeStorageNbytes(weight.sizes(), weight.strides(), weight.element_size(),
                                                         weight.storage_offset());
  TORCH_CHECK(weight.storage().nbytes() >= needed, argument, ": the weight's storage is released or cut short: it has ",
              weight.storage().nbytes(), " bytes and needs ", needed, " (", describe(weight), ")");
}

Strides canonical_strides(at::IntArrayRef size, at::MemoryFormat memory_format) {
  if (memory_format == at::MemoryFormat::ChannelsLast) return c10::get_channels_last_strides_2d(size);
  if (memory_format == at::MemoryFormat::ChannelsLast3d) return c10::get_channels_last_strides_3d(size);
  Strides strides(size.size(), 1);
  for (size_t d = size.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(size[d], 1);
  return strides;
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

bool in_format(const at::Tensor& weight, at::MemoryFormat memory_format) {
  return weight.strides() == at::IntArrayRef(canonical_strides(weight.sizes(), memory_format));
}

FilterOrder filter_order(const at::Tensor& weight) {
  if (weight.numel() == 0) return FilterOrder::either;
  const bool channels_first = weight.is_contiguous();
  const bool channels_last = weight.is_contiguous(channels_last_of(weight));
  return channels_first ? (channels_last ? FilterOrder::either : FilterOrder::channels_first)
                        : (channels_last ? FilterOrder::channels_last : FilterOrder::neither);
}

Matrices matrices_of(const at::Tensor& weight, FilterOrder from, FilterOrder to) {
  if (from == to || from == FilterOrder::either || to == FilterOrder::either) return {weight.numel(), 1, 1};
  const int64_t channels = weight.size(1), taps = weight.numel() / (weight.size(0) * channels);
  if (from == FilterOrder::channels_last) return {weight.size(0), taps, channels};
  return {weight.size(0), channels, taps};
}

std::string describe(const at::Tensor& tensor) {
  std::ostringstream text;
  text << "shape " << tensor.sym_sizes() << ", strides " << tensor.sym_strides() << ", dtype " << tensor.scalar_type()
       << ", device " << tensor.device();
  return text.str();
}

}  // namespace nhwc
