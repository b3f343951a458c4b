#include "in_place/plan.h"

#include <algorithm>

#include "layout/arguments.h"

namespace nhwc {
namespace {

// `strides_of` takes a weight, and the argument that an error about it names.
template <typename StridesOf>
std::vector<WeightPlan> plan(const char* op, at::TensorList weights, StoragePolicy policy,
                             const StridesOf& strides_of) {
  const bool is_traced = is_tracing();
  std::vector<WeightPlan> plans;
  plans.reserve(weights.size());
  for (size_t index = 0; index < weights.size(); ++index) {
    const at::Tensor& weight = weights[index];
    const Argument argument{op, index, weights.size()};
    const Strides strides = strides_of(weight, argument);
    const Outcome outcome = is_traced ? Outcome::traced : decide_outcome(weight, strides, policy);
    if (outcome > Outcome::unchanged) check_storage(argument, weight);
    const Outcome of_gradient = decide_gradient_outcome(weight, strides, outcome);
    plans.push_back({strides, is_refusal(of_gradient) ? of_gradient : outcome, of_gradient});
  }
  return plans;
}

}  // namespace

std::vector<WeightPlan> plan_format(const char* op, at::TensorList weights,
                                    std::optional<at::MemoryFormat> memory_format, StoragePolicy policy) {
  return plan(op, weights, policy, [&](const at::Tensor& weight, const Argument& argument) {
    const auto format = resolve_memory_format(argument, weight, memory_format);
    // A tensor with symbolic sizes is refused later.
    const bool has_sizes = !weight.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
    return has_sizes ? canonical_strides(weight.sizes(), format) : Strides{};
  });
}

std::vector<WeightPlan> plan_strides(const char* op, at::TensorList weights, at::IntArrayRef strides,
                                     StoragePolicy policy) {
  const auto plans = plan(op, weights, policy, [&](const at::Tensor& weight, const Argument& argument) {
    check_strided(argument, weight);
    const size_t dim = weight.dim();
    TORCH_CHECK(strides.size() >= dim, argument, ": there are fewer strides than dimensions");
    const at::IntArrayRef requested = strides.slice(0, dim);
    strides = strides.slice(dim);
    // PyTorch has none, not even where they are never used: of dimensions of size 1, and of empty tensors.
    const bool is_negative = std::any_of(requested.begin(), requested.end(), [](int64_t stride) { return stride < 0; });
    TORCH_CHECK(!is_negative, argument, ": expected no negative strides, got ", requested, " for ", describe(weight));
    TORCH_CHECK(is_non_overlapping(weight.sizes(), requested), argument,
                ": expected strides by which no elements overlap, got ", requested, " for ", describe(weight));
    return Strides(requested);
  });
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
