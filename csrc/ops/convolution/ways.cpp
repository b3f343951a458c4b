#include "ops/convolution/ways.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "layout/channels_last.h"
#include "ops/composition.h"
#include "ops/convolution/faults.h"

namespace nhwc {
namespace {

/// Returns whether a gradient of a tensor may be to come. For a tensor that torch.func has wrapped, another level of
/// its transforms may require one.
bool has_gradient_to_come(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet wrapped{c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched};
  return at::GradMode::is_enabled() && (tensor.requires_grad() || tensor.key_set().has_any(wrapped));
}

/// Returns the result of a changed call: in channels-last, and with a gradient in it, if the input is.
template <typename Change>
at::Tensor changed(const Call& call, const Change& change) {
  Call other = call;
  const bool is_channels_last_input = call.is_channels_last_input();
  if (is_channels_last_input) other.input = with_channels_last_grad(call.input);
  const at::Tensor out = change(other);
  return is_channels_last_input ? as_channels_last_output(out) : out;
}

/// Returns a view of canonical strides in the input's own order, or a copy of an input that is not dense.
at::Tensor with_canonical_strides(const at::Tensor& input) {
  return is_channels_last(input) ? to_channels_last(input)
                                 : input.contiguous().flatten().view_symint(input.sym_sizes());
}

at::Tensor padded(const at::Tensor& input, const at::SymDimVector& padding) {
  at::SymDimVector sides;
  for (size_t index = padding.size(); index-- > 0;) sides.append(2, padding[index]);
  return at::constant_pad_nd_symint(input, sides, 0);
}

// Calls that PyTorch computes or refuses by itself.

bool is_unfit(const Call& call) { return !is_composed(call.input) || !call.is_accepted(); }

/// Computes PyTorch's result, and restores the format of the input where PyTorch loses it.
at::Tensor by_pytorch_restored(const Call& call) {
  return changed(call, [](const Call& same) { return same.pytorchs(); });
}

// Inputs as they come.

bool is_one_sample(const Call& call) { return static_cast<size_t>(call.input.dim()) == call.axes() + 1; }

at::Tensor as_batch(const Call& call) {
  Call batch = call;
  batch.input = call.input.unsqueeze(0);
  return convolution(batch).squeeze(0);
}

/// Returns whether a contiguous volume meets a channels-last weight. Of 2D ones PyTorch itself takes the weight's
/// format, of volumes only where oneDNN computes.
bool is_volume_in_other_format(const Call& call) {
  if (call.axes() != 3 || is_channels_last(call.input) || !is_channels_last(call.weight)) return false;
  return !has_channels_last_strides(call.input);
}

at::Tensor formatted(const Call& call) {
  Call other = call;
  other.input = to_channels_last(call.input);
  return convolution(other);
}

/// Returns whether PyTorch's kernels may go by an odd stride, which weight gradients were wrong by.
bool is_odd(const Call& call) { return has_odd_strides(call.input); }

at::Tensor restrided(const Call& call) {
  Call other = call;
  other.input = with_canonical_strides(call.input);
  return convolution(other);
}

// Faults of this machine and these shapes.

bool may_be_wrong_column(const Call& call) {
  const ConvolutionFaults& faults = convolution_faults();
  const bool is_half = at::isReducedFloatingType(call.input.scalar_type());
  return call.stride.back() > 1 &&
         ((faults.strided_columns && call.weight.sym_size(1) == 1) || (faults.halves_with_amx && is_half));
}

bool is_wrong_column(const Call& call) {
  return !call.is_transposed && may_be_wrong_column(call) && call.axis(1).positions == 1;
}

/// Narrows the input to the columns under the kernel, whose width then needs no stride.
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

/// Returns whether the last planes of a volume of half precision are under no tap: AMX leaves their gradient unwritten.
bool has_wrong_depth(const Call& call) {
  if (call.is_transposed || call.axes() != 3 || !convolution_faults().halves_with_amx) return false;
  if (!at::isReducedFloatingType(call.input.scalar_type()) || !has_gradient_to_come(call.input)) return false;
  const Axis depth = call.axis(3);
  return depth.size + depth.padding > (depth.positions - 1) * depth.stride + depth.reach + 1;
}

/// Narrows the input to the planes that are under a tap.
at::Tensor trimmed(const Call& call) {
  return changed(call, [](Call& other) {
    const Axis depth = other.axis(3);
    const c10::SymInt size = (depth.positions - 1) * depth.stride + depth.reach + 1 - depth.padding;
    other.input = with_canonical_strides(other.input.narrow_symint(2, 0, size));
    return convolution(other);
  });
}

bool is_wrong_small_input(const Call& call) {
  return !call.is_transposed && convolution_faults().small_inputs && call.misses_kernel();
}

at::Tensor padded_before(const Call& call) {
  return changed(call, [](Call& other) {
    other.input = padded(other.input, other.padding);
    other.padding.assign(other.axes(), 0);
    return convolution(other);
  });
}

/// Returns whether a 2D kernel has one tap, strides, and so few channels that oneDNN computes its gradient wrong.
bool has_wrong_strided_tap(const Call& call) {
  if (!convolution_faults().strided_taps || call.axes() != 2 || !has_gradient_to_come(call.weight)) return false;
  if (call.weight.sym_size(2) != 1 || call.weight.sym_size(3) != 1 || call.weight.sym_size(1) >= 16) return false;
  return call.stride[0] > 1 || call.stride[1] > 1;
}

bool is_wrong_strided_tap(const Call& call) {
  if (call.is_transposed || !has_wrong_strided_tap(call)) return false;
  return is_channels_last(call.weight) || is_channels_last(call.input);
}

/// Slices the input by the strides.
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

// The same for transposed convolutions. The gradient of the input is a convolution, which may be wrong as others are.

/// Returns a part of a result, which is no view: in channels-last, or contiguous.
at::Tensor part_of(const at::Tensor& whole, const at::Tensor& part) {
  return is_channels_last(whole) ? as_channels_last_output(part) : part.clone(at::MemoryFormat::Contiguous);
}

bool is_wrong_wide_output(const Call& call) {
  return call.is_transposed && may_be_wrong_column(call) && call.input.sym_size(-1) == 1;
}

/// Adds a column to the input, and cuts off what comes of it.
at::Tensor widened(const Call& call) {
  return changed(call, [&](Call& other) {
    other.input = at::constant_pad_nd_symint(other.input, {0, 1}, 0);
    const at::Tensor wide = convolution(other);
    return part_of(wide, wide.narrow_symint(-1, 0, call.axis(1).size));
  });
}

bool is_wrong_small_output(const Call& call) {
  return call.is_transposed && convolution_faults().small_inputs && call.misses_kernel();
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

/// Computes without padding, and cuts it off the output.
at::Tensor cut(const Call& call) {
  return changed(call, [&](Call& other) {
    other.padding.assign(other.axes(), 0);
    const at::Tensor whole = convolution(other);
    return part_of(whole, cut_to(call, whole));
  });
}

bool is_wrong_extended_tap(const Call& call) {
  if (!call.is_transposed || !has_wrong_strided_tap(call)) return false;
  return call.output_padding[0] > 0 || call.output_padding[1] > 0;
}

/// Computes without output padding, which adds nothing but the bias.
at::Tensor extended(const Call& call) {
  return changed(call, [&](Call& other) {
    other.bias = {};
    other.padding.assign(2, 0);
    other.output_padding.assign(2, 0);
    const at::Tensor whole = convolution(other), out = cut_to(call, whole);
    return part_of(whole, call.has_bias() ? out + call.bias->view({-1, 1, 1}) : out);
  });
}

// Volumes that PyTorch computes slowly.

/// Returns whether a kernel has one tap in the plane. Kernels with more, or a stride there, gain nothing.
bool has_one_tap_in_the_plane(const Call& call) {
  if (call.axes() != 3 || call.is_transposed || !is_channels_last(call.input)) return false;
  for (size_t index = 1; index < 3; ++index) {
    if (call.weight.sym_size(index + 2) != 1 || call.padding[index] != 0 || call.stride[index] != 1) return false;
  }
  // With groups, only these cases were faster when measured.
  const at::ScalarType type = call.input.scalar_type();
  if (call.groups > 1 && (call.weight.sym_size(2) != 1 || type != at::kFloat)) return false;
  return type == call.weight.scalar_type() && (!call.has_bias() || call.bias->scalar_type() == type);
}

/// Returns whether PyTorch's settings require the same precision of matrix products and of convolutions.
bool is_as_precise_as_products() {
  const auto precision = [](at::Float32Op op) {
    const at::Float32Precision set = at::globalContext().float32Precision(at::Float32Backend::MKLDNN, op);
    return set == at::Float32Precision::NONE ? at::Float32Precision::IEEE : set;
  };
  return precision(at::Float32Op::MATMUL) == precision(at::Float32Op::CONV);
}

/// Returns whether a convolution is one matrix product over all voxels, which is faster than a convolution except for
/// narrow types.
bool is_linear(const Call& call) {
  const bool is_wide = call.input.scalar_type() == at::kFloat || call.input.scalar_type() == at::kDouble;
  return is_wide && has_one_tap_in_the_plane(call) && call.weight.sym_size(2) == 1 && call.stride[0] == 1 &&
         call.padding[0] == 0 && call.groups == 1 && is_as_precise_as_products();
}

at::Tensor linear(const Call& call) {
  const at::Tensor kernel = with_same_layout_grad(call.weight);  // its views may get gradients in other strides
  return changed(call, [&](const Call& other) {
    return channels_from_end(at::linear(channels_to_end(other.input), kernel.flatten(1), other.bias));
  });
}

/// Computes a 2D convolution over a view.
at::Tensor along_depth(const Call& call) {
  const at::Tensor kernel = with_same_layout_grad(call.weight);
  return changed(call, [&](const Call& volume) {
    Call columns = volume;
    columns.input = to_columns(volume.input);
    columns.weight = kernel.squeeze(4);
    for (at::SymDimVector* each : {&columns.stride, &columns.padding, &columns.dilation}) each->pop_back();
    return from_columns(convolution(columns), volume.input.sym_size(4));
  });
}

constexpr int64_t slabs = 2;  // which are a batch for oneDNN, however many threads share it

/// Returns whether a channels-last volume is one sample, and PyTorch would not give it to oneDNN. Its rule of float32,
/// `ConvParams::use_mkldnn` in aten/src/ATen/native/Convolution.cpp, is made for the sizes of a 2D batch: of a 3D one
/// it takes batch, channels, depth and height. What it leaves is computed by matrix products over copies of the
/// input, 1.3 to 7 times slower. With groups, it leaves nothing. The same is true of half precision in float32.
bool is_slow_sample(const Call& call) {
  if (call.axes() != 3 || call.input.sym_size(0) != 1 || call.groups != 1 || !is_channels_last(call.input) ||
      !at::globalContext().userEnabledMkldnn()) {
    return false;
  }
  if (is_onednns(call.backend())) return false;
  if (call.input.scalar_type() == at::kFloat) return true;
  if (!at::isReducedFloatingType(call.input.scalar_type())) return false;
  Call wide = call;
  wide.bias = {};
  for (at::Tensor* each : {&wide.input, &wide.weight}) {  // which nobody reads or writes
    *each = at::empty_strided_symint(each->sym_sizes(), each->sym_strides(), each->options().dtype(at::kFloat));
  }
  return !is_onednns(wide.backend());
}

c10::SymInt positions_of(const Call& call) {
  c10::SymInt positions = 1;
  for (int64_t from_last = 1; from_last <= static_cast<int64_t>(call.axes()); ++from_last) {
    positions = positions * call.axis(from_last).positions;
  }
  return positions;
}

/// Returns the axis that a sample is cut along: its depth, or the height where the depth has one position. The results
/// of the slabs then lie one after the other.
int64_t axis_of_slabs(const Call& call) { return call.axis(3).positions == 1 ? 2 : 3; }

/// Returns whether a sample can be cut into slabs, and gains: a convolution between any two positions, a transposed one
/// where the outputs of its positions do not overlap. Cutting takes a tenth of a millisecond, and where there are few
/// positions, oneDNN spends its time on the weight. (Measured from 2 to 48 cubed, 4 to 512 channels.)
bool gains_from_slabs(const Call& call) {
  if (call.axes() != 3) return false;
  const c10::SymInt positions = positions_of(call);
  const int64_t from_last = axis_of_slabs(call);
  const Axis axis = call.axis(from_last);
  if (axis.positions < slabs || positions * call.weight.sym_numel() < 2'000'000) return false;
  if (!call.is_transposed) return positions >= 64 && is_slow_sample(call);
  const bool is_apart = axis.reach + 1 == axis.stride && axis.padding == 0 && call.output_padding[3 - from_last] == 0;
  return from_last == 3 && is_apart && positions >= 512 && is_slow_sample(call);
}

/// Computes one sample as a batch: slabs of it, with as much of the next one as the kernel reaches. In channels-last
/// the results lie one after the other, so they are the whole without a copy.
at::Tensor in_slabs(const Call& call) {
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

/// Returns whether a sample has so few positions that the copy of its windows is smaller than what oneDNN or PyTorch
/// copies of the weight.
bool has_few_positions(const Call& call) {
  if (call.axes() != 3 || call.is_transposed || call.input.scalar_type() != at::kFloat) return false;
  const c10::SymInt positions = positions_of(call);
  const c10::SymInt weights = call.weight.sym_numel();
  const bool is_few = (positions < 64 && weights >= 200'000) || (positions <= 128 && weights >= 1'000'000);  // measured
  return is_few && is_channels_last(call.weight) && is_slow_sample(call) && is_as_precise_as_products();
}

/// Computes one matrix product of the windows of the kernel, gathered into rows, and of the weight as it stands.
at::Tensor gathered(const Call& call) {
  const at::Tensor kernel = with_same_layout_grad(call.weight);
  return changed(call, [&](const Call& whole) {
    at::Tensor windows = channels_to_end(padded(whole.input, whole.padding)).squeeze(0);  // `[D, H, W, C]`
    for (int64_t dim = 0; dim < 3; ++dim) {
      const Axis axis = call.axis(3 - dim);
      windows = windows.unfold(dim, (axis.reach + 1).expect_int(), axis.stride.expect_int())
                    .slice_symint(-1, {}, {}, call.dilation[dim]);
    }
    const at::Tensor rows = windows.movedim(3, -1).flatten(3);
    return channels_from_end(at::linear(rows, channels_to_end(kernel).flatten(1), whole.bias).unsqueeze(0));
  });
}

// What remains.

/// Returns whether PyTorch's result of a channels-last input is not.
bool loses_format(const Call& call) {
  if (!is_channels_last(call.input)) return false;
  const at::MemoryFormat format = call.axes() == 3 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
  return call.input.is_complex() ||
         at::native::_determine_backend_memory_format(call.input, call.weight, call.backend()) != format;
}

bool always(const Call&) { return true; }

const Way ways[] = {
    {"unfit", is_unfit, by_pytorch_restored},
    {"batched", is_one_sample, as_batch},
    {"formatted", is_volume_in_other_format, formatted},
    {"restrided", is_odd, restrided},
    {"narrowed", is_wrong_column, narrowed},
    {"trimmed", has_wrong_depth, trimmed},
    {"padded", is_wrong_small_input, padded_before},
    {"sliced", is_wrong_strided_tap, sliced},
    {"widened", is_wrong_wide_output, widened},
    {"extended", is_wrong_extended_tap, extended},
    {"cut", is_wrong_small_output, cut},
    {"linear", is_linear, linear},
    {"along_depth", has_one_tap_in_the_plane, along_depth},
    {"gathered", has_few_positions, gathered},
    {"slabs", gains_from_slabs, in_slabs},
    {"float32", needs_float32, by_float32},
    {"restored", loses_format, by_pytorch_restored},
    {"pytorch", always, [](const Call& call) { return call.pytorchs(); }},
};

}  // namespace

const Way& way_of(const Call& call) {
  return *std::find_if(std::begin(ways), std::end(ways), [&](const Way& way) { return way.applies(call); });
}

at::Tensor convolution(const Call& call) { return way_of(call).compute(call); }

}  // namespace nhwc
