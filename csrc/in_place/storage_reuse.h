// Who owns the bytes of a weight: the one place that decides between keep, restride, reuse, fresh and refuse.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "torch_nhwc/ops.h"

namespace nhwc {

/// The `storage` argument of the in-place operators.
enum class StoragePolicy { automatic, fresh, reuse, detach };

/// Raises, in the name of `op`, for anything but "auto", "fresh", "reuse" and "detach".
StoragePolicy parse_storage_policy(const char* op, std::string_view storage);

/// Whether a tracer is active. It would run a conversion while it records, on the real weight, and leave it out of the
/// graph: every weight is then `Outcome::traced`.
bool is_tracing();

/// What bringing `weight` into `strides` will do. Reads reference counts only: it takes no reference to the storage,
/// and wraps none, so that asking changes no later answer.
///
/// The weight's bytes may be permuted in place when the weight is dense and spans the whole of a storage that nothing
/// else holds, in memory of the device's own allocator. Memory from elsewhere (NumPy, a memory map, another process)
/// may have owners that the count of references does not see.
Outcome decide_outcome(const at::Tensor& weight, at::IntArrayRef strides, StoragePolicy policy);

/// What becomes of a weight's gradient, always under `StoragePolicy::automatic`: it follows a weight that changes, and
/// joins one that is kept where it can.
Outcome decide_gradient_outcome(const at::Tensor& weight, at::IntArrayRef strides, Outcome outcome_of_weight);

/// Whether something else holds the weight's storage, other than the storage's own Python wrapper that nobody has.
bool is_held(const at::Tensor& weight);

inline bool is_refusal(Outcome outcome) { return outcome < Outcome::kept; }

/// Whether an outcome brings new storage.
inline bool is_fresh(Outcome outcome) {
  return outcome == Outcome::fresh || outcome == Outcome::fresh_held || outcome == Outcome::fresh_foreign ||
         outcome == Outcome::fresh_shared;
}

}  // namespace nhwc
