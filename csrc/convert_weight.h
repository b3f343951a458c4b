// What the functional operators share under every dispatch key. Their contract stands on torch_nhwc/ops.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "memory_format.h"

namespace nhwc {

/// The checked arguments of a functional conversion, nothing left open.
struct Conversion {
  at::MemoryFormat memory_format;
  at::ScalarType dtype;
};

/// Raises on arguments that `convert_weight` does not take. Sizes and strides may be symbolic.
Conversion check_conversion(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format,
                            std::optional<at::ScalarType> dtype, const Argument& argument = {"nhwc::convert_weight"});

/// Writes the values of `weight` into `out`: same shape and device, canonical strides of some memory format, a memory
/// of its own, and a dtype that `check_conversion` let pass.
void write_weight(const at::Tensor& weight, const at::Tensor& out);

}  // namespace nhwc
