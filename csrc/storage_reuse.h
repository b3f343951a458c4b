// Who owns the bytes of a weight: the one place that decides between keep, restride, reuse, fresh and refuse.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

#include "torch_nhwc/ops.h"

namespace nhwc {

/// The `storage` argument of the in-place operators.
enum class StoragePolicy { automatic, fresh, reuse };

/// Raises, in the name of `op`, for anything but "auto", "fresh" and "reuse".
StoragePolicy parse_storage_policy(const char* op, std::string_view storage);

/// What an in-place conversion of `weight` will do. Reads reference counts only: it takes no reference to the storage,
/// and wraps none, so that asking changes no later answer.
///
/// The weight's bytes may be permuted in place when the weight is dense and spans the whole of a storage that nothing
/// else holds, in memory of the device's own allocator. Memory from elsewhere (NumPy, a memory map, another process)
/// may have owners that the count of references does not see. A DLPack export of a weight that needs no gradient holds
/// the tensor itself instead of its storage: it is recognised by more references to such a tensor than
/// `known_references`, the owner's and the call's.
Outcome decide_outcome(const at::Tensor& weight, at::MemoryFormat memory_format, StoragePolicy policy,
                       size_t known_references);

/// `decide_outcome` for the gradient that follows a weight, always under `StoragePolicy::automatic`. `gradient` is the
/// weight's own reference to it, not a copy.
Outcome decide_gradient_outcome(const at::Tensor& gradient, at::MemoryFormat memory_format);

/// Whether a tensor stands for something else than its own bytes: traced, fake, functional, batched, a subclass with
/// dispatch of its own, or a lazy conjugate or negative view.
bool is_traced(const at::Tensor& tensor);

/// Whether an outcome is a refusal, and the sentence that explains it: what is wrong and what to do.
inline bool is_refusal(Outcome outcome) { return static_cast<int64_t>(outcome) < 0; }
const char* refusal_sentence(Outcome refusal);

}  // namespace nhwc
