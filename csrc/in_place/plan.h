// What an in-place operator will do to each weight of a list, decided before anything is touched.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "in_place/storage_reuse.h"
#include "weights/memory_format.h"

namespace nhwc {

/// The decision for one weight, and for the gradient that goes with it.
struct WeightPlan {
  Strides strides;
  Outcome outcome;
  Outcome gradient_outcome;
};

/// Every weight into a memory format. Raises, in the name of `op`, for what is no weight or not of the format's rank.
std::vector<WeightPlan> plan_format(const char* op, at::TensorList weights,
                                    std::optional<at::MemoryFormat> memory_format, StoragePolicy policy);

/// Every weight into strides of its own: those of all weights, one weight after the other.
std::vector<WeightPlan> plan_strides(const char* op, at::TensorList weights, at::IntArrayRef strides,
                                     StoragePolicy policy);

/// The outcomes as the operators return them.
std::vector<int64_t> outcomes_of(const std::vector<WeightPlan>& plans);

}  // namespace nhwc
