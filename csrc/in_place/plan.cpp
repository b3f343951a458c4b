#include "in_place/plan.h"

#include <utility>

#include "weights/arguments.h"

namespace nhwc {
namespace {

WeightPlan plan_weight(const Argument& argument, const at::Tensor& weight, Strides strides, StoragePolicy policy,
                       bool is_traced) {
  const Outcome outcome = is_traced ? Outcome::traced : decide_outcome(weight, strides, policy);
  if (outcome > Outcome::kept) check_storage(argument, weight);
  const Outcome gradient_outcome = decide_gradient_outcome(weight, strides, outcome);
  return {std::move(strides), is_refusal(gradient_outcome) ? gradient_outcome : outcome, gradient_outcome};
}

}  // namespace

std::vector<WeightPlan> plan_format(const char* op, at::TensorList weights,
                                    std::optional<at::MemoryFormat> memory_format, StoragePolicy policy) {
  const bool is_traced = is_tracing();
  std::vector<WeightPlan> plans;
  plans.reserve(weights.size());
  for (size_t index = 0; index < weights.size(); ++index) {
    const Argument argument{op, index, weights.size()};
    const at::Tensor& weight = weights[index];
    const auto format = resolve_memory_format(argument, weight, memory_format);
    // Symbolic sizes belong to tensors that are refused.
    const bool has_sizes = !weight.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
    Strides strides = has_sizes ? canonical_strides(weight.sizes(), format) : Strides{};
    plans.push_back(plan_weight(argument, weight, std::move(strides), policy, is_traced));
  }
  return plans;
}

std::vector<WeightPlan> plan_strides(const char* op, at::TensorList weights, at::IntArrayRef strides,
                                     StoragePolicy policy) {
  const bool is_traced = is_tracing();
  std::vector<WeightPlan> plans;
  plans.reserve(weights.size());
  for (size_t index = 0; index < weights.size(); ++index) {
    const Argument argument{op, index, weights.size()};
    const at::Tensor& weight = weights[index];
    check_strided(argument, weight);
    const size_t dim = weight.dim();
    TORCH_CHECK(strides.size() >= dim, argument, ": there are fewer strides than dimensions");
    const at::IntArrayRef wanted = strides.slice(0, dim);
    TORCH_CHECK(is_non_overlapping(weight.sizes(), wanted), argument,
                ": expected strides by which no elements overlap, got ", wanted, " for ", describe(weight));
    plans.push_back(plan_weight(argument, weight, Strides(wanted), policy, is_traced));
    strides = strides.slice(dim);
  }
  TORCH_CHECK(strides.empty(), op, ": there are ", strides.size(), " strides more than dimensions");
  return plans;
}

std::vector<int64_t> outcomes_of(const std::vector<WeightPlan>& plans) {
  std::vector<int64_t> outcomes;
  outcomes.reserve(plans.size());
  for (const WeightPlan& plan : plans) outcomes.push_back(static_cast<int64_t>(plan.outcome));
  return outcomes;
}

}  // namespace nhwc
