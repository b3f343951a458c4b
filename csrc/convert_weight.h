// What the functional operators share under every dispatch key. Their contract stands on torch_nhwc/ops.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

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

/// A tensor for the result of a conversion: contents undefined.
at::Tensor empty_weight(at::IntArrayRef size, at::IntArrayRef strides, const at::TensorOptions& options);

/// The values of `weight` go to `out`: same shape and device, any strides that do not overlap, a memory of its own, and
/// a dtype that `check_conversion` let pass.
struct Write {
  at::Tensor weight, out;
};
void write_weights(const std::vector<Write>& writes);

/// The same for one weight, by PyTorch's own copy: for strides and devices that no kernel of ours serves.
void copy_any_strides(const at::Tensor& weight, const at::Tensor& out);

/// Makes `out` differentiable as the conversion of `weight`, where that is asked for.
void record_conversion(const at::Tensor& weight, const at::Tensor& out);

}  // namespace nhwc
