// Copies values into existing memory: the functional operators without the allocation.
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include "batch/weight_batch.h"
#include "layout/arguments.h"
#include "layout/memory_format.h"

namespace nhwc {
namespace {

constexpr const char* op = "nhwc::copy_weight_";

std::string mismatch(const at::Tensor& self, const at::Tensor& weight) {
  return c10::str(op, ": expected a tensor of the weight's shape and device, contiguous or channels-last, got ",
                  describe(self), " for the weight ", describe(weight));
}

// Sizes and strides may be symbolic.
void check_arguments(const at::Tensor& self, const at::Tensor& weight) {
  resolve_target(weight, std::nullopt, self.scalar_type(), {op});
  TORCH_CHECK(self.sym_sizes() == weight.sym_sizes() && self.device() == weight.device(), mismatch(self, weight));
}

void copy_weight_kernel_(const at::Tensor& self, const at::Tensor& weight) {
  check_arguments(self, weight);
  TORCH_CHECK(is_in_format(self, at::MemoryFormat::Contiguous) || is_in_format(self, channels_last_of(self)),
              mismatch(self, weight));
  TORCH_CHECK(!self.is_neg() && !self.is_conj(), op, ": expected a tensor that is not a lazy view, got ",
              describe(self));
  check_storage({op}, self);
  check_storage({op}, weight);
  TORCH_CHECK(!self.is_alias_of(weight) || at::get_overlap_status(self, weight) == at::MemOverlapStatus::No, op,
              ": expected memory that does not overlap the weight's: use convert_weight_ for a conversion in place");
  const at::Tensor resolved = weight.resolve_conj().resolve_neg();
  WeightBatch batch;
  batch.write_or_add(resolved, self);
  batch.allocate();
  batch.run();
}

const auto& operation() {
  static const auto found =
      c10::Dispatcher::singleton().findSchemaOrThrow(op, "").typed<void(const at::Tensor&, const at::Tensor&)>();
  return found;
}

// Only values are copied, so there must be nothing to record.
void copy_weight_autograd_(c10::DispatchKeySet keys, const at::Tensor& self, const at::Tensor& weight) {
  const bool has_tangent = self._fw_grad(/*level=*/0).defined() || weight._fw_grad(/*level=*/0).defined();
  TORCH_CHECK(!has_tangent && !torch::autograd::compute_requires_grad(self, weight), op,
              ": expected tensors that need no gradient: call it under torch.no_grad(), or use convert_weight");
  const at::AutoDispatchBelowAutograd below;
  operation().redispatch(keys & c10::after_autograd_keyset, self, weight);
}

// Graphs that saved `self` must notice that it changed, also when that happens in inference mode.
void copy_weight_in_place_(c10::DispatchKeySet keys, const at::Tensor& self, const at::Tensor& weight) {
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    operation().redispatch(keys & c10::after_ADInplaceOrView_keyset, self, weight);
  }
  if (!self.is_inference()) torch::autograd::impl::bump_version(self);
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeExplicitAutograd, m) { m.impl("copy_weight_", TORCH_FN(copy_weight_kernel_)); }
TORCH_LIBRARY_IMPL(nhwc, Meta, m) { m.impl("copy_weight_", TORCH_FN(check_arguments)); }
TORCH_LIBRARY_IMPL(nhwc, ADInplaceOrView, m) { m.impl("copy_weight_", TORCH_FN(copy_weight_in_place_)); }
TORCH_LIBRARY_IMPL(nhwc, Autograd, m) { m.impl("copy_weight_", TORCH_FN(copy_weight_autograd_)); }

}  // namespace nhwc
