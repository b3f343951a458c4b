#include "ops/convolution/rewrites.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <vector>

#include "layout/channels_last.h"
#include "ops/composition.h"
#include "ops/convolution/faults.h"

namespace nhwc::rewrites {
namespace {

/// Returns the result of a changed call: in channels-last, and with a gradient in it, if the input is.
template <typename Change>
at::Tensor changed(const Call& call, const Change& change) {
  const bool is_channels_last_input = call.has_channels_last_input();
  Call other = call;
  if (is_channels_last_input) other.input = with_channels_last_grad(call.input);
  const at::Tensor out = change(other);
  return is_channels_last_input ? as_channels_last_output(out) : out;
}

/// Pads each spatial dimension with zeros on both sides.
at::Tensor padded(const at::Tensor& input, const at::SymDimVector& padding) {
  at::SymDimVector sides;
  for (size_t index = padding.size(); index-- > 0;) sides.append(2, padding[index]);
  return at::constant_pad_nd_symint(input, sides, 0);
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

}  // namespace

at::Tensor as_it_is(const Call& call, Convolution) { return call.pytorchs(); }

at::Tensor restored(const Call& call, Convolution) {
  return changed(call, [](const Call& same) { return same.pytorchs(); });
}

at::Tensor as_batch(const Call& call, Convolution convolution) {
  Call batch = call;
  batch.input = call.input.unsqueeze(0);
  return convolution(batch).squeeze(0);
}

at::Tensor formatted(const Call& call, Convolution convolution) {
  Call other = call;
  other.input = to_channels_last(call.input);
  return convolution(other);
}

at::Tensor in_contiguous(const Call& call, Convolution) {
  const bool is_one_sample = static_cast<size_t>(call.input.dim()) == call.axes() + 1;
  Call other = call;
  if (is_one_sample) other.input = call.input.unsqueeze(0);
  if (other.has_channels_last_input()) other.input = with_channels_last_grad(other.input);
  other.input = to_contiguous(other.input);
  other.weight = to_contiguous(with_same_layout_grad(call.weight));
  const at::Tensor out = as_channels_last_output(other.pytorchs());
  return is_one_sample ? out.squeeze(0) : out;
}

at::Tensor restrided(const Call& call, Convolution convolution) {
  Call other = call;
  other.input = with_canonical_strides(call.input);
  return convolution(other);
}

namespace {

/// Returns a part of a call's input in canonical strides of that input's format, which one pixel alone would not show.
at::Tensor in_format_of(const Call& call, const at::Tensor& part) {
  return call.has_channels_last_input() ? to_channels_last(part) : with_canonical_strides(part);
}

}  // namespace

at::Tensor narrowed(const Call& call, Convolution convolution) {
  return changed(call, [&](Call& other) {
    const Axis width = other.axis(1);
    if (width.padding != 0) other.input = at::constant_pad_nd_symint(other.input, {width.padding, width.padding}, 0);
    other.input = in_format_of(call, other.input.narrow_symint(-1, 0, width.reach + 1));
    other.stride.back() = 1;
    other.padding.back() = 0;
    return convolution(other);
  });
}

at::Tensor trimmed(const Call& call, Convolution convolution) {
  return changed(call, [&](Call& other) {
    other.input = in_format_of(call, other.input.narrow_symint(2, 0, faults::planes_under_a_tap(other)));
    return convolution(other);
  });
}

at::Tensor padded_before(const Call& call, Convolution convolution) {
  return changed(call, [&](Call& other) {
    other.input = padded(other.input, other.padding);
    other.padding.assign(other.axes(), 0);
    return convolution(other);
  });
}

at::Tensor sliced(const Call& call, Convolution convolution) {
  return changed(call, [&](Call& other) {
    const bool has_padding =
        std::any_of(other.padding.begin(), other.padding.end(), [](auto& each) { return each != 0; });
    if (has_padding) other.input = padded(other.input, other.padding);
    // The gradient of a slice is contiguous, so that this is one of a view in the order of the memory.
    const bool is_channels_last_input = other.has_channels_last_input();
    at::Tensor pixels = is_channels_last_input ? channels_to_end(other.input) : other.input;
    for (size_t index = 0; index < other.axes(); ++index) {
      const auto dim = static_cast<int64_t>(index) + (is_channels_last_input ? 1 : 2);
      if (other.stride[index] != 1) pixels = pixels.slice_symint(dim, {}, {}, other.stride[index]);
    }
    other.input = in_format_of(call, is_channels_last_input ? channels_from_end(pixels) : pixels);
    other.padding.assign(other.axes(), 0);
    other.stride.assign(other.axes(), 1);
    return convolution(other);
  });
}

at::Tensor widened(const Call& call, Convolution convolution) {
  return changed(call, [&](Call& other) {
    other.input = at::constant_pad_nd_symint(other.input, {0, 1}, 0);
    const at::Tensor wide = convolution(other);
    return part_of(wide, wide.narrow_symint(-1, 0, call.axis(1).size));
  });
}

at::Tensor extended(const Call& call, Convolution convolution) {
  return changed(call, [&](Call& other) {
    other.bias = {};
    other.padding.assign(2, 0);
    other.output_padding.assign(2, 0);
    const at::Tensor whole = convolution(other), out = cut_to(call, whole);
    return part_of(whole, call.has_bias() ? out + call.bias->view({-1, 1, 1}) : out);
  });
}

at::Tensor cut(const Call& call, Convolution convolution) {
  return changed(call, [&](Call& other) {
    other.padding.assign(other.axes(), 0);
    const at::Tensor whole = convolution(other);
    return part_of(whole, cut_to(call, whole));
  });
}

at::Tensor along_depth(const Call& call, Convolution convolution) {
  const at::Tensor kernel = with_same_layout_grad(call.weight);
  return changed(call, [&](const Call& volume) {
    Call columns = volume;
    columns.input = to_columns(volume.input);
    columns.weight = kernel.squeeze(4);
    for (at::SymDimVector* each : {&columns.stride, &columns.padding, &columns.dilation, &columns.output_padding}) {
      each->pop_back();
    }
    return from_columns(convolution(columns), volume.input.sym_size(4));
  });
}

int64_t axis_of_slabs(const Call& call) { return call.axis(3).positions == 1 ? 2 : 3; }

at::Tensor in_slabs(const Call& call, Convolution convolution) {
  const int64_t from_last = axis_of_slabs(call), dim = 3 - from_last;  // of the rows `[D, H, W, C]`
  const Axis axis = call.axis(from_last);
  const c10::SymInt positions = quotient_rounded_up(axis.positions, slabs);  // of each slab
  const c10::SymInt step = call.is_transposed ? positions : positions * axis.stride;
  const c10::SymInt size = call.is_transposed ? positions : (positions - 1) * axis.stride + axis.reach + 1;
  const c10::SymInt before = call.is_transposed ? c10::SymInt(0) : axis.padding;
  const c10::SymInt given = call.input.sym_size(dim + 2);
  return changed(call, [&](const Call& whole) {
    const at::Tensor rows = channels_to_end(whole.input).squeeze(0);
    std::vector<at::Tensor> pieces;
    const auto add_zeros = [&](const c10::SymInt& count) {
      at::SymDimVector sizes(rows.sym_sizes().begin(), rows.sym_sizes().end());
      sizes[dim] = count;
      if (count > 0) pieces.push_back(rows.new_zeros_symint(sizes));
    };
    const auto within = [](const c10::SymInt& row, const c10::SymInt& most) {
      return row.max(c10::SymInt(0)).min(most);
    };
    std::vector<at::Tensor> cut;
    for (int64_t slab = 0; slab < slabs; ++slab) {
      const c10::SymInt begin = slab * step - before, end = begin + size;
      const c10::SymInt first = within(begin, given), last = within(end, given);
      add_zeros(within(-begin, size));
      if (last > first) pieces.push_back(rows.narrow_symint(dim, first, last - first));
      add_zeros(within(end - given, size));
      if (dim == 0) continue;  // all pieces are joined at once
      cut.push_back(pieces.size() == 1 ? pieces[0] : at::cat(pieces, dim));
      pieces.clear();
    }
    Call batch = whole;
    const at::Tensor joined = dim == 0 ? at::cat(pieces).unflatten_symint(0, {slabs, size}) : at::stack(cut);
    batch.input = channels_from_end(joined);
    if (!call.is_transposed) batch.padding[dim] = 0;
    const at::Tensor out = channels_to_end(convolution(batch));  // `[slabs, D, H, W, C]`
    const at::Tensor joined_out = dim == 0 ? out.flatten(0, 1) : out.squeeze(1).flatten(0, 1).unsqueeze(0);
    const c10::SymInt& rows_of_output = call.is_transposed ? axis.size : axis.positions;
    return channels_from_end(joined_out.narrow_symint(dim, 0, rows_of_output).unsqueeze(0));
  });
}

}  // namespace nhwc::rewrites
