#include "layout/arguments.h"

#include <ATen/EmptyTensor.h>
#include <c10/util/Exception.h>

#include "layout/memory_format.h"

namespace nhwc {

std::ostream& operator<<(std::ostream& out, const Argument& argument) {
  out << argument.op;
  if (argument.count > 1) out << ", weight " << argument.index << " of " << argument.count;
  return out;
}

std::string describe(const at::Tensor& tensor) {
  return c10::str("shape ", tensor.sym_sizes(), ", strides ", tensor.sym_strides(), ", dtype ", tensor.scalar_type(),
                  ", device ", tensor.device());
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

void check_storage(const Argument& argument, const at::Tensor& weight) {
  if (!weight.has_storage() || weight.is_meta()) return;
  const size_t needed = at::detail::computeStorageNbytes(weight.sizes(), weight.strides(), weight.element_size(),
                                                         weight.storage_offset());
  TORCH_CHECK(weight.storage().nbytes() >= needed, argument, ": the weight's storage is released or cut short: it has ",
              weight.storage().nbytes(), " bytes and needs ", needed, " (", describe(weight), ")");
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

Target resolve_target(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format,
                      std::optional<at::ScalarType> dtype, const Argument& argument) {
  const auto format = resolve_memory_format(argument, weight, memory_format);
  const auto to = dtype.value_or(weight.scalar_type());
  // Float4_e2m1fn_x2 is two numbers in a byte: a floating-point type by name, but single elements have no cast.
  const auto castable = [](at::ScalarType type) {
    return at::isFloatingType(type) && type != at::ScalarType::Float4_e2m1fn_x2;
  };
  TORCH_CHECK_TYPE(to == weight.scalar_type() || (castable(weight.scalar_type()) && castable(to)), argument,
                   ": expected a cast between floating types, got ", weight.scalar_type(), " to ", to,
                   "; cast with Tensor.to first");
  return {format, to};
}

}  // namespace nhwc
