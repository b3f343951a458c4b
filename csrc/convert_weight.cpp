#include "convert_weight.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpu/convert_weight.h"
#include "cuda/convert_weight.h"
#include "torch_nhwc/ops.h"

namespace nhwc {

Conversion check_conversion(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format,
                            std::optional<at::ScalarType> dtype, const Argument& argument) {
  const auto format = resolve_memory_format(argument, weight, memory_format);
  const auto to = dtype.value_or(weight.scalar_type());
  // Float4_e2m1fn_x2 is two numbers in a byte: floating by name, but with no conversion of one element.
  const auto castable = [](at::ScalarType type) {
    return at::isFloatingType(type) && type != at::ScalarType::Float4_e2m1fn_x2;
  };
  TORCH_CHECK_TYPE(to == weight.scalar_type() || (castable(weight.scalar_type()) && castable(to)), argument,
                   ": expected a cast between floating types, got ", weight.scalar_type(), " to ", to,
                   "; cast with Tensor.to first");
  return {format, to};
}

void write_weight(const at::Tensor& weight, const at::Tensor& out) {
  if (weight.is_cpu()) {
    cpu::write_weight(weight, out);
#ifdef TORCH_NHWC_WITH_CUDA
  } else if (weight.is_cuda()) {
    cuda::write_weight(weight, out);
#endif
  } else if (!weight.is_meta()) {
    out.copy_(weight);
  }
}

namespace {

at::Tensor convert_weight_kernel(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format,
                                 std::optional<at::ScalarType> dtype) {
  const auto [format, to] = check_conversion(weight, memory_format, dtype);
  check_storage({"nhwc::convert_weight"}, weight);
  at::Tensor out = at::empty(weight.sizes(), weight.options().dtype(to), format);
  write_weight(weight, out);
  return out;
}

std::vector<at::Tensor> convert_weights_kernel(at::TensorList weights, std::optional<at::MemoryFormat> memory_format,
                                               std::optional<at::ScalarType> dtype) {
  for (size_t index = 0; index < weights.size(); ++index) {
    check_conversion(weights[index], memory_format, dtype, {"nhwc::convert_weights", index, weights.size()});
  }
  std::vector<at::Tensor> results;
  results.reserve(weights.size());
  for (const at::Tensor& weight : weights) results.push_back(convert_weight(weight, memory_format, dtype));
  return results;
}

}  // namespace

// For every device: those without a kernel of ours are served by PyTorch's own copy. Layouts that are not strided come
// here as well, and get the same clear error as everywhere; only nested tensors must be named.
TORCH_LIBRARY_IMPL(nhwc, CompositeExplicitAutograd, m) { m.impl("convert_weight", TORCH_FN(convert_weight_kernel)); }
TORCH_LIBRARY_IMPL(nhwc, NestedTensorCPU, m) { m.impl("convert_weight", TORCH_FN(convert_weight_kernel)); }
TORCH_LIBRARY_IMPL(nhwc, NestedTensorCUDA, m) { m.impl("convert_weight", TORCH_FN(convert_weight_kernel)); }

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { m.impl("convert_weights", TORCH_FN(convert_weights_kernel)); }

// Without this registration vmap would ask for a batching rule of the list instead of decomposing it.
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) {
  m.impl("convert_weights", TORCH_FN(convert_weights_kernel));
}

}  // namespace nhwc
