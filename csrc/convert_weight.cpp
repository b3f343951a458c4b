#include "convert_weight.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "cpu/convert_weight.h"
#include "cuda/convert_weight.h"
#include "memory_format.h"
#include "torch_nhwc/ops.h"

namespace nhwc {

Conversion check_conversion(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format,
                            std::optional<at::ScalarType> dtype) {
  const auto format = resolve_memory_format("nhwc::convert_weight", weight, memory_format);
  const auto to = dtype.value_or(weight.scalar_type());
  // Float4_e2m1fn_x2 is two numbers in a byte: floating by name, but with no conversion of one element.
  const auto castable = [](at::ScalarType type) {
    return at::isFloatingType(type) && type != at::ScalarType::Float4_e2m1fn_x2;
  };
  TORCH_CHECK_TYPE(to == weight.scalar_type() || (castable(weight.scalar_type()) && castable(to)),
                   "nhwc::convert_weight: expected a cast between floating types, got ", weight.scalar_type(), " to ",
                   to, "; cast with Tensor.to first");
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
  at::Tensor out = at::empty(weight.sizes(), weight.options().dtype(to), format);
  write_weight(weight, out);
  return out;
}

std::vector<at::Tensor> convert_weights_kernel(at::TensorList weights, std::optional<at::MemoryFormat> memory_format,
                                               std::optional<at::ScalarType> dtype) {
  for (const at::Tensor& weight : weights) check_conversion(weight, memory_format, dtype);
  std::vector<at::Tensor> results;
  results.reserve(weights.size());
  for (const at::Tensor& weight : weights) results.push_back(convert_weight(weight, memory_format, dtype));
  return results;
}

// Devices without a kernel of ours are served by PyTorch's own copy. Layouts that are not strided have dispatch keys of
// their own; under them the same kernel raises the same clear error as everywhere.
constexpr c10::DispatchKey kernel_keys[] = {
    c10::DispatchKey::CPU,
    c10::DispatchKey::CUDA,
    c10::DispatchKey::HIP,
    c10::DispatchKey::XPU,
    c10::DispatchKey::MPS,
    c10::DispatchKey::HPU,
    c10::DispatchKey::IPU,
    c10::DispatchKey::XLA,
    c10::DispatchKey::VE,
    c10::DispatchKey::MTIA,
    c10::DispatchKey::MAIA,
    c10::DispatchKey::PrivateUse1,
    c10::DispatchKey::PrivateUse2,
    c10::DispatchKey::PrivateUse3,
    c10::DispatchKey::SparseCPU,
    c10::DispatchKey::SparseCUDA,
    c10::DispatchKey::SparseCsrCPU,
    c10::DispatchKey::SparseCsrCUDA,
    c10::DispatchKey::QuantizedCPU,
    c10::DispatchKey::QuantizedCUDA,
    c10::DispatchKey::MkldnnCPU,
    c10::DispatchKey::NestedTensorCPU,
    c10::DispatchKey::NestedTensorCUDA,
};

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { m.impl("convert_weights", TORCH_FN(convert_weights_kernel)); }

// Without this registration vmap would ask for a batching rule of the list instead of decomposing it.
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) {
  m.impl("convert_weights", TORCH_FN(convert_weights_kernel));
}

TORCH_LIBRARY_FRAGMENT(nhwc, m) {
  for (const auto key : kernel_keys) m.impl("convert_weight", torch::dispatch(key, TORCH_FN(convert_weight_kernel)));
}

}  // namespace nhwc
