// Derivatives of convert_weight: it is linear, and its adjoint is the conversion back.
//
// The node is written by hand because only this form also passes torch.func, compiled autograd, double backward, and
// programs that never start Python: torch::autograd::Function raises under torch.func, and a formula registered from
// Python is lost, without an error, where our Python is not imported.
#include "ops/convert_weight.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>
#include <torch/version.h>

#include "torch_nhwc/ops.h"
#include "weights/arguments.h"

namespace nhwc {
namespace {

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

}  // namespace

void record_conversion(const at::Tensor& weight, const at::Tensor& out) {
  if (!autograd::compute_requires_grad(weight) || !autograd::isDifferentiableType(out.scalar_type())) return;
  const auto node = make_node();
  node->memory_format = gradient_format(weight);
  node->dtype = weight.scalar_type();
  node->set_next_edges(autograd::collect_next_edges(weight));
  autograd::set_history(out, node);
}

TORCH_LIBRARY_IMPL(nhwc, Autograd, m) { m.impl("convert_weight", TORCH_FN(convert_weight_autograd)); }

}  // namespace nhwc
