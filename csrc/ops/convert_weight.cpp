#include "ops/convert_weight.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <algorithm>

#include "torch_nhwc/ops.h"
#include "weights/arguments.h"
#include "weights/memory_format.h"
#include "writing/weight_queue.h"

namespace nhwc {

namespace {

at::Tensor convert_weight_kernel(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format,
                                 std::optional<at::ScalarType> dtype) {
  const auto [format, to] = resolve_target(weight, memory_format, dtype);
  check_storage({"nhwc::convert_weight"}, weight);
  at::Tensor out = empty_weight(weight.sizes(), canonical_strides(weight.sizes(), format), weight.options().dtype(to));
  WeightQueue queue;
  queue.write_or_queue(weight, out);
  queue.allocate();
  queue.run();
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
  std::vector<Target> targets;
  targets.reserve(weights.size());
  for (size_t index = 0; index < weights.size(); ++index) {
    targets.push_back(resolve_target(weights[index], memory_format, dtype, {op, index, weights.size()}));
  }
  std::vector<at::Tensor> results;
  results.reserve(weights.size());
  if (!can_be_one_call(weights)) {
    for (const at::Tensor& weight : weights) results.push_back(convert_weight(weight, memory_format, dtype));
    return results;
  }
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    WeightQueue queue;
    for (size_t index = 0; index < weights.size(); ++index) {
      const at::Tensor& weight = weights[index];
      check_storage({op, index, weights.size()}, weight);
      const auto [format, to] = targets[index];
      const Strides strides = canonical_strides(weight.sizes(), format);
      results.push_back(empty_weight(weight.sizes(), strides, weight.options().dtype(to)));
      queue.write_or_queue(weight, results.back());
    }
    queue.allocate();
    queue.run();
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
