#include "ops/convolution/mended.h"

#include <ATen/ATen.h>

#include "layout/channels_last.h"
#include "ops/composition.h"
#include "ops/convolution/faults.h"
#include "ops/convolution/rewriting.h"

namespace nhwc::mended {
namespace {

bool may_be_wrong_column(const Call& call) {
  const ConvolutionFaults& faults = convolution_faults();
  const bool is_half = at::isReducedFloatingType(call.input.scalar_type());
  return call.stride.back() > 1 &&
         ((faults.strided_columns && call.weight.sym_size(1) == 1) || (faults.halves_with_amx && is_half));
}

/// Returns whether a 2D kernel has one tap, strides, and so few channels that oneDNN computes its gradient wrong.
bool has_wrong_strided_tap(const Call& call) {
  if (!convolution_faults().strided_taps || call.axes() != 2 || !has_gradient_to_come(call.weight)) return false;
  if (call.weight.sym_size(2) != 1 || call.weight.sym_size(3) != 1 || call.weight.sym_size(1) >= 16) return false;
  return call.stride[0] > 1 || call.stride[1] > 1;
}

/// Returns a part of a result, which is no view: in channels-last, or contiguous.
at::Tensor part_of(const at::Tensor& whole, const at::Tensor& part) {
  return is_channels_last(whole) ? as_channels_last_output(part) : part.clone(at::MemoryFormat::Contiguous);
}

/// Narrows an output that has no padding cut off to the output that has. What it lacks at the end is zeros, which only
/// an output padding adds.
at::Tensor cut_to(const Call& call, const at::Tensor& whole) {
  at::Tensor out = whole;
  for (int64_t from_last = 1; from_last <= static_cast<int64_t>(call.axes()); ++from_last) {
    const Axis axis = call.axis(from_last);
    const c10::SymInt missing = axis.padding + axis.size - out.sym_size(-from_last);
    if (missing > 0) {
      at::SymDimVector sides(2 * from_last, 0);
      sides.back() = missing;
      out = at::constant_pad_nd_symint(out, sides, 0);
    }
    out = out.narrow_symint(-from_last, axis.padding, axis.size);
  }
  return out;
}

/// Returns how many planes of a volume there are up to the last one under a tap.
c10::SymInt planes_under_a_tap(const Call& call) {
  const Axis depth = call.axis(3);
  return (depth.positions - 1) * depth.stride + depth.reach + 1 - depth.padding;
}

}  // namespace

bool is_column(const Call& call) {
  return !call.is_transposed && may_be_wrong_column(call) && call.axis(1).positions == 1;
}

at::Tensor narrowed(const Call& call) {
  return changed(call, [](Call& other) {
    const Axis width = other.axis(1);
    if (width.padding != 0) other.input = at::constant_pad_nd_symint(other.input, {width.padding, width.padding}, 0);
    other.input = with_canonical_strides(other.input.narrow_symint(-1, 0, width.reach + 1));
    other.stride.back() = 1;
    other.padding.back() = 0;
    return convolution(other);
  });
}

bool has_depth_under_no_tap(const Call& call) {
  if (call.is_transposed || call.axes() != 3 || !convolution_faults().halves_with_amx) return false;
  if (!at::isReducedFloatingType(call.input.scalar_type()) || !has_gradient_to_come(call.input)) return false;
  const c10::SymInt planes = planes_under_a_tap(call);
  return planes > 0 && planes < call.input.sym_size(2);  // where all are under none, the input is padded first
}

at::Tensor trimmed(const Call& call) {
  return changed(call, [](Call& other) {
    other.input = with_canonical_strides(other.input.narrow_symint(2, 0, planes_under_a_tap(other)));
    return convolution(other);
  });
}

bool is_small_input(const Call& call) {
  return !call.is_transposed && convolution_faults().small_inputs && call.misses_kernel();
}

at::Tensor padded_before(const Call& call) {
  return changed(call, [](Call& other) {
    other.input = padded(other.input, other.padding);
    other.padding.assign(other.axes(), 0);
    return convolution(other);
  });
}

bool is_strided_tap(const Call& call) {
  if (call.is_transposed || !has_wrong_strided_tap(call)) return false;
  return is_channels_last(call.weight) || is_channels_last(call.input);
}

at::Tensor sliced(const Call& call) {
  return changed(call, [](Call& other) {
    if (other.padding[0] != 0 || other.padding[1] != 0) other.input = padded(other.input, other.padding);
    for (int64_t index = 0; index < 2; ++index) {
      other.input = other.input.slice_symint(index + 2, {}, {}, other.stride[index]);
    }
    other.input = with_canonical_strides(other.input);
    other.padding.assign(2, 0);
    other.stride.assign(2, 1);
    return convolution(other);
  });
}

bool is_transposed_column(const Call& call) {
  return call.is_transposed && may_be_wrong_column(call) && call.input.sym_size(-1) == 1;
}

at::Tensor widened(const Call& call) {
  return changed(call, [&](Call& other) {
    other.input = at::constant_pad_nd_symint(other.input, {0, 1}, 0);
    const at::Tensor wide = convolution(other);
    return part_of(wide, wide.narrow_symint(-1, 0, call.axis(1).size));
  });
}

bool is_small_output(const Call& call) {
  return call.is_transposed && convolution_faults().small_inputs && call.misses_kernel();
}

at::Tensor cut(const Call& call) {
  return changed(call, [&](Call& other) {
    other.padding.assign(other.axes(), 0);
    const at::Tensor whole = convolution(other);
    return part_of(whole, cut_to(call, whole));
  });
}

bool is_extended_tap(const Call& call) {
  if (!call.is_transposed || !has_wrong_strided_tap(call)) return false;
  return call.output_padding[0] > 0 || call.output_padding[1] > 0;
}

at::Tensor extended(const Call& call) {
  return changed(call, [&](Call& other) {
    other.bias = {};
    other.padding.assign(2, 0);
    other.output_padding.assign(2, 0);
    const at::Tensor whole = convolution(other), out = cut_to(call, whole);
    return part_of(whole, call.has_bias() ? out + call.bias->view({-1, 1, 1}) : out);
  });
}

bool is_needed(const Call& call) {
  return is_column(call) || has_depth_under_no_tap(call) || is_small_input(call) || is_strided_tap(call) ||
         is_transposed_column(call) || is_extended_tap(call) || is_small_output(call);
}

}  // namespace nhwc::mended
