// Carries out the plans of an in-place operator, so that all of it happens or nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "in_place/plan.h"

namespace nhwc {

/// All or nothing: raises for the first refusal before anything changes. What is permuted in place has everything that
/// it needs before anything changes. New memory of the CPU is made in stages, and if there is none left for one, the
/// weights of those before have their values, strides and format back: in their old memory where something else holds
/// it, else in new memory. Then only a device that fails can stop it.
void commit(const char* op, at::TensorList weights, const std::vector<WeightPlan>& plans);

}  // namespace nhwc
