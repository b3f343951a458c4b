// Values alone are copied: nothing may be recorded, and what was saved of `self` is told that it changed.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

namespace nhwc {
namespace {

constexpr const char* op = "nhwc::copy_weight_";

const auto& operation() {
  static const auto found =
      c10::Dispatcher::singleton().findSchemaOrThrow(op, "").typed<void(const at::Tensor&, const at::Tensor&)>();
  return found;
}

void copy_weight_autograd_(c10::DispatchKeySet keys, const at::Tensor& self, const at::Tensor& weight) {
  const bool has_tangent = self._fw_grad(/*level=*/0).defined() || weight._fw_grad(/*level=*/0).defined();
  TORCH_CHECK(!has_tangent && !torch::autograd::compute_requires_grad(self, weight), op,
              ": expected tensors that need no gradient: call it under torch.no_grad(), or use convert_weight");
  const at::AutoDispatchBelowAutograd below;
  operation().redispatch(keys & c10::after_autograd_keyset, self, weight);
}

// In inference mode too.
void copy_weight_in_place_(c10::DispatchKeySet keys, const at::Tensor& self, const at::Tensor& weight) {
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    operation().redispatch(keys & c10::after_ADInplaceOrView_keyset, self, weight);
  }
  if (!self.is_inference()) torch::autograd::impl::bump_version(self);
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, ADInplaceOrView, m) { m.impl("copy_weight_", TORCH_FN(copy_weight_in_place_)); }
TORCH_LIBRARY_IMPL(nhwc, Autograd, m) { m.impl("copy_weight_", TORCH_FN(copy_weight_autograd_)); }

}  // namespace nhwc
