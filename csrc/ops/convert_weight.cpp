// The functional operators under every dispatch key: kernel, shapes, batches, derivatives.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <algorithm>

#include "batch/weight_batch.h"
#include "layout/arguments.h"
#include "layout/memory_format.h"
#include "ops/autograd_node.h"
#include "torch_nhwc/ops.h"

namespace nhwc {
namespace {

/// Allocates memory for a weight, in canonical strides.
at::Tensor empty_weight(const at::Tensor& weight, at::MemoryFormat format, at::ScalarType type) {
  const Strides strides = canonical_strides(weight.sizes(), format);
  const at::TensorOptions options = weight.options().dtype(type);
  // This is what the dispatcher would call. For a small weight the dispatch takes as long as everything else.
  if (weight.is_cpu()) return at::Tensor(at::detail::empty_strided_cpu(weight.sizes(), strides, options));
  return at::empty_strided(weight.sizes(), strides, options);
}

at::Tensor convert_weight_kernel(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format,
                                 std::optional<at::ScalarType> dtype) {
  const auto [format, to] = resolve_target(weight, memory_format, dtype);
  check_storage({"nhwc::convert_weight"}, weight);
  const at::Tensor out = empty_weight(weight, format, to);
  WeightBatch batch;
  batch.write_or_add(weight, out);
  batch.allocate();
  batch.run();
  return out;
}

// Computes exact shapes, strides and dtype without data, for known and symbolic sizes.
at::Tensor convert_weight_meta(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format,
                               std::optional<at::ScalarType> dtype) {
  const auto [format, to] = resolve_target(weight, memory_format, dtype);
  return at::empty_symint(weight.sym_sizes(), weight.options().dtype(to), format);
}

// Filters are independent of each other, so a batch of weights is one weight of more filters.
at::Tensor convert_weight_batched(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format,
                                  std::optional<at::ScalarType> dtype) {
  const auto [format, to] = resolve_target(weight, memory_format, dtype);
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::FuncTorchBatched);
  const auto* batched = at::functorch::maybeGetBatchedImpl(weight);
  TORCH_INTERNAL_ASSERT(batched, "the batching rule was called without a batched tensor");
  const at::Tensor batch = batched->value().movedim(batched->bdim(), 0);
  const at::Tensor converted = convert_weight(batch.flatten(0, 1), format, to);
  return at::functorch::makeBatched(converted.unflatten_symint(0, {batch.sym_size(0), batch.sym_size(1)}), 0,
                                    batched->level());
}

// Derivatives: the conversion is linear, and its adjoint is the conversion back.
namespace autograd = torch::autograd;

const Formula convert_back = {
    "ConvertWeightBackward",
    [](const std::vector<at::Tensor>& gradients, const Formula::Context& context) -> std::vector<at::Tensor> {
      if (!gradients[0].defined() || !context.needed[0]) return {at::Tensor()};
      return {convert_weight(gradients[0], static_cast<at::MemoryFormat>(context.constants[0].toInt()),
                             static_cast<at::ScalarType>(context.constants[1].toInt()))};
    }};

// Returns the format in which AccumulateGrad accepts the gradient without a copy. Sizes and strides may be symbolic.
at::MemoryFormat gradient_format(const at::Tensor& weight) {
  return weight.is_non_overlapping_and_dense() ? weight.suggest_memory_format() : at::MemoryFormat::Contiguous;
}

// Makes `out` differentiable as the conversion of `weight`, if the weight requires a gradient.
void record_conversion(const at::Tensor& weight, const at::Tensor& out) {
  if (!autograd::compute_requires_grad(weight) || !autograd::isDifferentiableType(out.scalar_type())) return;
  record(convert_back, out, {weight}, {},
         {static_cast<int64_t>(gradient_format(weight)), static_cast<int64_t>(weight.scalar_type())});
}

at::Tensor convert_weight_autograd(c10::DispatchKeySet keys, const at::Tensor& weight,
                                   std::optional<at::MemoryFormat> memory_format, std::optional<at::ScalarType> dtype) {
  const auto [format, to] = resolve_target(weight, memory_format, dtype);
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("nhwc::convert_weight", "")
          .typed<at::Tensor(const at::Tensor&, std::optional<at::MemoryFormat>, std::optional<at::ScalarType>)>();
  at::Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = op.redispatch(keys & c10::after_autograd_keyset, weight, format, to);
  }
  record_conversion(weight, out);
  const at::Tensor& tangent = weight._fw_grad(/*level=*/0);
  if (tangent.defined()) out._set_fw_grad(convert_weight(tangent, format, to), /*level=*/0, /*is_inplace_op=*/false);
  return out;
}

// Returns whether one batch may replace separate calls of convert_weight: no mode or transform is active, and every
// weight is an ordinary tensor in memory without a tangent. (A profiler then sees one call.)
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
    WeightBatch batch;
    for (size_t index = 0; index < weights.size(); ++index) {
      const at::Tensor& weight = weights[index];
      check_storage({op, index, weights.size()}, weight);
      const auto [format, to] = targets[index];
      results.push_back(empty_weight(weight, format, to));
      batch.write_or_add(weight, results.back());
    }
    batch.allocate();
    batch.run();
  }
  const bool is_below_autograd =
      c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset);
  for (size_t index = 0; !is_below_autograd && index < weights.size(); ++index) {
    record_conversion(weights[index], results[index]);
  }
  return results;
}

}  // namespace

// For every device: without a kernel of ours PyTorch's own copy serves. Layouts that are not strided also come here,
// and raise the same error as everywhere; only the keys of nested tensors must be named.
TORCH_LIBRARY_IMPL(nhwc, CompositeExplicitAutograd, m) { m.impl("convert_weight", TORCH_FN(convert_weight_kernel)); }
TORCH_LIBRARY_IMPL(nhwc, NestedTensorCPU, m) { m.impl("convert_weight", TORCH_FN(convert_weight_kernel)); }
TORCH_LIBRARY_IMPL(nhwc, NestedTensorCUDA, m) { m.impl("convert_weight", TORCH_FN(convert_weight_kernel)); }
TORCH_LIBRARY_IMPL(nhwc, Meta, m) { m.impl("convert_weight", TORCH_FN(convert_weight_meta)); }
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatched, m) { m.impl("convert_weight", TORCH_FN(convert_weight_batched)); }
TORCH_LIBRARY_IMPL(nhwc, Autograd, m) { m.impl("convert_weight", TORCH_FN(convert_weight_autograd)); }

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { m.impl("convert_weights", TORCH_FN(convert_weights_kernel)); }

// Without this registration vmap would look for a batching rule of the list instead of decomposing it.
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) {
  m.impl("convert_weights", TORCH_FN(convert_weights_kernel));
}

}  // namespace nhwc
