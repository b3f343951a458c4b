// Operators in lower precision under autocast.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

namespace nhwc {

/// Calls an operator in lower precision, as autocast does PyTorch's convolutions and linear layers. The casts precede
/// the views, whose casts autocast would not cache.
template <auto operation>
struct Lowered;

template <typename Result, typename... Others,
          Result (*operation)(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, Others...)>
struct Lowered<operation> {
  static Result call(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                     Others... others) {
    const c10::impl::ExcludeDispatchKeyGuard off(c10::autocast_dispatch_keyset);
    const auto lower = [device = input.device().type()](const auto& tensor) {
      const at::ScalarType dtype = at::autocast::get_lower_precision_fp_from_device_type(device);
      return at::autocast::cached_cast(dtype, tensor, device);
    };
    return operation(lower(input), lower(weight), lower(bias), std::forward<Others>(others)...);
  }
};

}  // namespace nhwc
