// The in-place operators: check and plan everything, then commit.
//
// They are composite, so that they see the tensors themselves: below autograd, functionalization would silently drop
// the change of strides. A tensor that represents another one is refused instead.
#include <torch/library.h>

#include "in_place/commit.h"
#include "in_place/plan.h"

namespace nhwc {
namespace {

std::vector<int64_t> apply(const char* op, at::TensorList weights, const std::vector<WeightPlan>& plans) {
  commit(op, weights, plans);
  return outcomes_of(plans);
}

std::vector<int64_t> plan_weights_kernel(at::TensorList weights, std::optional<at::MemoryFormat> memory_format,
                                         c10::string_view storage) {
  constexpr const char* op = "nhwc::plan_weights";
  return outcomes_of(plan_format(op, weights, memory_format, parse_storage_policy(op, storage)));
}

std::vector<int64_t> convert_in_place(const char* op, at::TensorList weights,
                                      std::optional<at::MemoryFormat> memory_format, c10::string_view storage) {
  return apply(op, weights, plan_format(op, weights, memory_format, parse_storage_policy(op, storage)));
}

std::vector<int64_t> convert_weights_kernel_(at::TensorList weights, std::optional<at::MemoryFormat> memory_format,
                                             c10::string_view storage) {
  return convert_in_place("nhwc::convert_weights_", weights, memory_format, storage);
}

int64_t convert_weight_kernel_(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format,
                               c10::string_view storage) {
  return convert_in_place("nhwc::convert_weight_", weight, memory_format, storage).front();
}

std::vector<int64_t> set_strides_kernel_(at::TensorList weights, at::IntArrayRef strides, c10::string_view storage) {
  constexpr const char* op = "nhwc::set_strides_";
  return apply(op, weights, plan_strides(op, weights, strides, parse_storage_policy(op, storage)));
}

void register_kernels(torch::Library& m) {
  m.impl("convert_weight_", TORCH_FN(convert_weight_kernel_));
  m.impl("convert_weights_", TORCH_FN(convert_weights_kernel_));
  m.impl("set_strides_", TORCH_FN(set_strides_kernel_));
  m.impl("plan_weights", TORCH_FN(plan_weights_kernel));
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { register_kernels(m); }

// Under these keys the kernels only refuse, in the usual words: torch.jit.trace would first run the operators and then
// fail to record them, and the errors of vmap and functionalize would be about batching rules and alias annotations.
TORCH_LIBRARY_IMPL(nhwc, Tracer, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(nhwc, Functionalize, m) { register_kernels(m); }

}  // namespace nhwc
