// The in-place operators: check and plan everything, then commit.
//
// They are composite, so that they see the tensors themselves: below autograd, functionalization would drop the change
// of strides in silence. Whatever stands for another tensor is refused instead.
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

std::vector<int64_t> lay_out_weights_kernel_(at::TensorList weights, at::IntArrayRef strides,
                                             c10::string_view storage) {
  constexpr const char* op = "nhwc::lay_out_weights_";
  return apply(op, weights, plan_strides(op, weights, strides, parse_storage_policy(op, storage)));
}

void register_kernels(torch::Library& m) {
  m.impl("convert_weight_", TORCH_FN(convert_weight_kernel_));
  m.impl("convert_weights_", TORCH_FN(convert_weights_kernel_));
  m.impl("lay_out_weights_", TORCH_FN(lay_out_weights_kernel_));
  m.impl("plan_weights", TORCH_FN(plan_weights_kernel));
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { register_kernels(m); }

// Here the kernels only refuse, with the same words as everywhere: torch.jit.trace would run the operators first and
// fail to record them second, vmap would speak of batching rules, and functionalize of alias annotations.
TORCH_LIBRARY_IMPL(nhwc, Tracer, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(nhwc, Functionalize, m) { register_kernels(m); }

}  // namespace nhwc
