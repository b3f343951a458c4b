#include "convert_weight.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu/convert_weight.h"
#include "cpu/pages.h"
#include "device_conversions.h"
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

at::Tensor empty_weight(at::IntArrayRef size, at::IntArrayRef strides, const at::TensorOptions& options) {
  at::Tensor out = at::empty_strided(size, strides, options);
  if (out.is_cpu()) cpu::advise_huge_pages(out);
  return out;
}

void write_weights(const std::vector<Write>& writes) {
  cpu::Conversions on_cpu;
  DeviceConversions on_devices;
  for (const auto& [weight, out] : writes) {
    if (weight.is_cpu()) {
      on_cpu.add_write(weight, out);
    } else {
      on_devices.add_write(weight, out);
    }
  }
  on_devices.allocate();
  on_devices.run();
  on_cpu.run();
}

void copy_any_strides(const at::Tensor& weight, const at::Tensor& out) {
  // PyTorch's copy has no kernel for some dtypes, such as those of less than a byte; as integers their elements move
  // too.
  constexpr std::pair<int64_t, at::ScalarType> integers[] = {
      {1, at::kByte}, {2, at::kShort}, {4, at::kInt}, {8, at::kLong}, {16, at::kComplexDouble}};
  if (weight.is_meta()) return;
  if (weight.scalar_type() != out.scalar_type()) {
    out.copy_(weight);
    return;
  }
  for (const auto& [size, integer] : integers) {
    if (size == weight.element_size()) out.view(integer).copy_(weight.view(integer));
  }
}

namespace {

at::Tensor convert_weight_kernel(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format,
                                 std::optional<at::ScalarType> dtype) {
  const auto [format, to] = check_conversion(weight, memory_format, dtype);
  check_storage({"nhwc::convert_weight"}, weight);
  at::Tensor out = empty_weight(weight.sizes(), canonical_strides(weight.sizes(), format), weight.options().dtype(to));
  write_weights({{weight, out}});
  return out;
}

// Whether one call may stand for the calls of convert_weight one by one: no mode or transform is active, and every
// weight is an ordinary tensor in memory without a tangent. (A profiler then sees the one call.)
bool can_be_one_call(at::TensorList weights) {
  constexpr auto ordinary =
      c10::DispatchKeySet({c10::DispatchKey::CPU, c10::DispatchKey::AutogradCPU, c10::DispatchKey::CUDA,
                           c10::DispatchKey::AutogradCUDA, c10::DispatchKey::ADInplaceOrView}) |
      c10::autocast_dispatch_keyset;
  const auto watching =
      c10::impl::tls_local_dispatch_key_set().included_ - c10::default_included_set - c10::autocast_dispatch_keyset;
  return watching.empty() && std::all_of(weights.begin(), weights.end(), [&](const at::Tensor& weight) {
           return (weight.key_set() | ordinary) == ordinary && !weight.is_inference() &&
                  !weight._fw_grad(/*level=*/0).defined();
         });
}

std::vector<at::Tensor> convert_weights_kernel(at::TensorList weights, std::optional<at::MemoryFormat> memory_format,
                                               std::optional<at::ScalarType> dtype) {
  constexpr const char* op = "nhwc::convert_weights";
  std::vector<Conversion> conversions;
  conversions.reserve(weights.size());
  for (size_t index = 0; index < weights.size(); ++index) {
    conversions.push_back(check_conversion(weights[index], memory_format, dtype, {op, index, weights.size()}));
  }
  std::vector<at::Tensor> results;
  results.reserve(weights.size());
  if (!can_be_one_call(weights)) {
    for (const at::Tensor& weight : weights) results.push_back(convert_weight(weight, memory_format, dtype));
    return results;
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    std::vector<Write> writes;
    writes.reserve(weights.size());
    for (size_t index = 0; index < weights.size(); ++index) {
      const at::Tensor& weight = weights[index];
      check_storage({op, index, weights.size()}, weight);
      const auto [format, to] = conversions[index];
      const Strides strides = canonical_strides(weight.sizes(), format);
      results.push_back(empty_weight(weight.sizes(), strides, weight.options().dtype(to)));
      writes.push_back({weight, results.back()});
    }
    write_weights(writes);
  }
  const bool is_below_autograd =
      c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset);
  for (size_t index = 0; !is_below_autograd && index < weights.size(); ++index) {
    record_conversion(weights[index], results[index]);
  }
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
