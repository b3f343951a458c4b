// The batching rule of vmap: filters are independent of each other, so a batch of weights is one weight of more
// filters.
#include <ATen/ATen.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <torch/library.h>

#include "torch_nhwc/ops.h"
#include "weights/arguments.h"

namespace nhwc {
namespace {

at::Tensor convert_weight_batched(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format,
                                  std::optional<at::ScalarType> dtype) {
  const auto [format, to] = resolve_target(weight, memory_format, dtype);
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::FuncTorchBatched);
  const auto* batched = at::functorch::maybeGetBatchedImpl(weight);
  TORCH_INTERNAL_ASSERT(batched, "the batching rule was called without a batched tensor");
  const at::Tensor batch = batched->value().movedim(batched->bdim(), 0);
  const at::Tensor converted = convert_weight(batch.flatten(0, 1), format, to);
  return at::functorch::makeBatched(converted.unflatten_symint(0, {batch.sym_size(0), batch.sym_size(1)}), 0,
                                    batched->level());
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatched, m) { m.impl("convert_weight", TORCH_FN(convert_weight_batched)); }

}  // namespace nhwc
