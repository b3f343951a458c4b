// What ways that rewrite a call have in common.
#pragma once

#include <ATen/ATen.h>

#include "layout/channels_last.h"
#include "ops/composition.h"
#include "ops/convolution/ways.h"

namespace nhwc {

/// Returns the result of a changed call: in channels-last, and with a gradient in it, if the input is.
template <typename Change>
at::Tensor changed(const Call& call, const Change& change) {
  Call other = call;
  const bool is_channels_last_input = call.is_channels_last_input();
  if (is_channels_last_input) other.input = with_channels_last_grad(call.input);
  const at::Tensor out = change(other);
  return is_channels_last_input ? as_channels_last_output(out) : out;
}

/// Pads each spatial dimension with zeros on both sides.
inline at::Tensor padded(const at::Tensor& input, const at::SymDimVector& padding) {
  at::SymDimVector sides;
  for (size_t index = padding.size(); index-- > 0;) sides.append(2, padding[index]);
  return at::constant_pad_nd_symint(input, sides, 0);
}

}  // namespace nhwc
