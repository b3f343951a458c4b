// Decides what an in-place operator will do to each weight of a list, before anything changes.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "in_place/storage_reuse.h"
#include "layout/memory_format.h"

namespace nhwc {

/// The decision for one weight and its gradient.
struct WeightPlan {
  Strides strides;
  Outcome outcome;
  Outcome gradient_outcome;
};

/// Plans to convert every weight to a memory format. Raises, in the name of `op`, for another rank than the format's.
std::vector<WeightPlan> plan_format(const char* op, at::TensorList weights,
                                    std::optional<at::MemoryFormat> memory_format, StoragePolicy policy);

/// Plans to give every weight its own strides, which are listed one weight after the other.
std::vector<WeightPlan> plan_strides(const char* op, at::TensorList weights, at::IntArrayRef strides,
                                     StoragePolicy policy);

/// Returns the outcomes as the operators do.
std::vector<int64_t> outcomes_of(const std::vector<WeightPlan>& plans);

}  // namespace nhwc
