// Exact shapes, strides and dtype without data, sizes known or symbolic.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "weights/arguments.h"

namespace nhwc {
namespace {

at::Tensor convert_weight_meta(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format,
                               std::optional<at::ScalarType> dtype) {
  const auto [format, to] = resolve_target(weight, memory_format, dtype);
  return at::empty_symint(weight.sym_sizes(), weight.options().dtype(to), format);
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, Meta, m) { m.impl("convert_weight", TORCH_FN(convert_weight_meta)); }

}  // namespace nhwc
