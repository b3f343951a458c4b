// Carries out the plans of an in-place operator: allocates everything, then changes everything.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "in_place/plan.h"

namespace nhwc {

/// All or nothing: raises for the first refusal, and for whatever else can fail, before anything is seen to change;
/// then only a device that fails can stop it.
void commit(const char* op, at::TensorList weights, const std::vector<WeightPlan>& plans);

}  // namespace nhwc
