// Carries out the plans of an in-place operator, all or nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "in_place/plan.h"

namespace nhwc {

/// All or nothing. Raises for the first refusal before anything changes. Permutations in place have all the memory that
/// they need before anything changes. New memory on the CPU is allocated in stages. If a stage gets none, the weights
/// of the stages before it get their values, strides and format back: in their old memory if something else holds it,
/// otherwise in new memory. After that, only a failing device can raise.
void commit(const char* op, at::TensorList weights, const std::vector<WeightPlan>& plans);

}  // namespace nhwc
