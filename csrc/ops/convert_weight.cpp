// The functional operators under every dispatch key: kernel, shapes, batches, derivatives.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>
#include <torch/version.h>

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

// Exact shapes, strides and dtype without data, sizes known or symbolic.
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
//
// The node is written by hand because only this form also passes torch.func, compiled autograd, double backward, and
// programs that never start Python: torch::autograd::Function raises under torch.func, and a formula registered from
// Python is lost, without an error, where our Python is not imported.
namespace autograd = torch::autograd;

struct ConvertWeightBackward : autograd::Node {
  at::MemoryFormat memory_format = at::MemoryFormat::Contiguous;
  at::ScalarType dtype = at::kFloat;

  autograd::variable_list apply(autograd::variable_list&& gradients) override {
    if (!gradients[0].defined() || !task_should_compute_output(0)) return {at::Tensor()};
    return {convert_weight(gradients[0], memory_format, dtype)};
  }

  std::string name() const override { return "ConvertWeightBackward"; }

  // Compiled autograd specialises on both, so that the graph it captures may hold them as constants.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& arguments) const override {
    arguments.collect(memory_format);
    arguments.collect(dtype);
  }

  autograd::variable_list apply_with_saved(const autograd::variable_list& gradients,
                                           torch::dynamo::autograd::SwapSavedVariables& saved) override;
};

// The graph of compiled autograd calls this function with what apply_with_saved packed.
autograd::variable_list apply_functional(const autograd::variable_list& gradients,
                                         const std::vector<c10::IValue>& arguments) {
  if (!gradients[0].defined()) return {at::Tensor()};
  return {convert_weight(gradients[0], static_cast<at::MemoryFormat>(arguments[0].toInt()),
                         static_cast<at::ScalarType>(arguments[1].toInt()))};
}

autograd::variable_list ConvertWeightBackward::apply_with_saved(const autograd::variable_list& gradients,
                                                                torch::dynamo::autograd::SwapSavedVariables& saved) {
  namespace compiled = torch::dynamo::autograd;
  const auto& compiler = compiled::getPyCompilerInterface();
  // Bound once, as the nodes of PyTorch itself: a name that is bound twice is an error.
  static const auto function = compiler->bind_function(saved.get_py_compiler(), "nhwc_convert_weight_backward",
                                                       apply_functional, {at::IntType::get(), at::IntType::get()},
                                                       /*is_custom_function=*/false, /*is_traceable=*/true);
  return compiler->call_function(saved.get_py_compiler(), "apply_functional", function, gradients,
                                 {static_cast<int64_t>(memory_format), static_cast<int64_t>(dtype)},
                                 compiled::IValuePacker<std::vector<std::optional<autograd::InputMetadata>>>::pack(
                                     compiled::get_input_metadata(next_edges())));
}

// The owning pointer of a node changed from std::shared_ptr to c10::intrusive_ptr after torch 2.11.
auto make_node() {
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 12
  return std::shared_ptr<ConvertWeightBackward>(new ConvertWeightBackward(), autograd::deleteNode);
#else
  return c10::make_intrusive<ConvertWeightBackward>();
#endif
}

// The format in which AccumulateGrad takes the gradient of `weight` without a copy. Sizes and strides may be symbolic.
at::MemoryFormat gradient_format(const at::Tensor& weight) {
  return weight.is_non_overlapping_and_dense() ? weight.suggest_memory_format() : at::MemoryFormat::Contiguous;
}

// Makes `out` differentiable as the conversion of `weight`, where that is asked for.
void record_conversion(const at::Tensor& weight, const at::Tensor& out) {
  if (!autograd::compute_requires_grad(weight) || !autograd::isDifferentiableType(out.scalar_type())) return;
  const auto node = make_node();
  node->memory_format = gradient_format(weight);
  node->dtype = weight.scalar_type();
  node->set_next_edges(autograd::collect_next_edges(weight));
  autograd::set_history(out, node);
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
TORCH_LIBRARY_IMPL(nhwc, Meta, m) { m.impl("convert_weight", TORCH_FN(convert_weight_meta)); }
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatched, m) { m.impl("convert_weight", TORCH_FN(convert_weight_batched)); }
TORCH_LIBRARY_IMPL(nhwc, Autograd, m) { m.impl("convert_weight", TORCH_FN(convert_weight_autograd)); }

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { m.impl("convert_weights", TORCH_FN(convert_weights_kernel)); }

// Without this registration vmap would ask for a batching rule of the list instead of decomposing it.
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) {
  m.impl("convert_weights", TORCH_FN(convert_weights_kernel));
}

}  // namespace nhwc
