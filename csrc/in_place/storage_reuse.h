// Who owns the bytes of a weight: the only place that decides between the outcomes.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "torch_nhwc/ops.h"

namespace nhwc {

/// The `storage` argument of the in-place operators.
enum class StoragePolicy { automatic, fresh, reuse, detach };

/// Raises, in the name of `op`, for anything but "auto", "fresh", "reuse" and "detach".
StoragePolicy parse_storage_policy(const char* op, std::string_view storage);

/// Returns whether a tracer is active. It would convert the real weight while it records, and leave the conversion out
/// of the graph: every weight is then `Outcome::traced`.
bool is_tracing();

/// Decides what giving `strides` to `weight` will do. Only reference counts are read: no reference to the storage is
/// taken and no wrapper is made, so that the decision does not change later ones.
///
/// The bytes may be permuted in place when the weight is dense and spans all of a storage that nothing else holds, in
/// memory of the device's own allocator. Memory from elsewhere (NumPy, a memory map, another process) may have owners
/// that reference counts do not include.
Outcome decide_outcome(const at::Tensor& weight, at::IntArrayRef strides, StoragePolicy policy);

/// Decides the outcome for a weight's gradient, always under `StoragePolicy::automatic`: it follows a weight that
/// changes, and joins an unchanged one where it can.
Outcome decide_gradient_outcome(const at::Tensor& weight, at::IntArrayRef strides, Outcome outcome_of_weight);

/// Returns whether anything else holds the weight's storage, besides the storage's own Python wrapper.
bool is_held(const at::Tensor& weight);

inline bool is_refusal(Outcome outcome) { return outcome < Outcome::unchanged; }

/// Returns whether an outcome allocates new storage.
inline bool is_copied(Outcome outcome) {
  return outcome == Outcome::copied || outcome == Outcome::copied_held || outcome == Outcome::copied_foreign ||
         outcome == Outcome::copied_shared;
}

}  // namespace nhwc
