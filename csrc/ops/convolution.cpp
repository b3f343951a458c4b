// Convolutions whose numbers are right where PyTorch's are not on a CPU, and those that PyTorch computes slowly on
// channels-last: 3D ones with one tap in the plane, and those of one sample. All others are PyTorch's own.
//
// Every way is a composition of PyTorch's operators: derivatives of any order, transforms and compilers need no more.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/ConvUtils.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "layout/channels_last.h"
#include "ops/composition.h"
#include "ops/convolution_faults.h"

namespace nhwc {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

/// The arguments of a convolution besides its tensors; of sizes, one for each axis of the kernel.
struct Arguments {
  at::SymDimVector stride;
  at::SymDimVector padding;
  at::SymDimVector dilation;
  c10::SymInt groups;
  at::SymDimVector output_padding = {};  // of a transposed convolution only
};

/// Returns the sizes of an argument, of which PyTorch takes one for all axes.
at::SymDimVector for_each_axis(at::SymIntArrayRef sizes, size_t axes) {
  if (sizes.size() == 1) return at::SymDimVector(axes, sizes[0]);
  return at::SymDimVector(sizes.begin(), sizes.end());
}

c10::SymInt quotient_rounded_up(const c10::SymInt& number, const c10::SymInt& divisor) {
  return (number + divisor - 1) / divisor;
}

/// A convolution along one axis of its kernel. For a transposed one, `size` is the output's and `positions` the
/// input's.
struct Axis {
  c10::SymInt size;
  c10::SymInt stride;
  c10::SymInt padding;
  c10::SymInt reach;  // from the kernel's first tap to its last
  c10::SymInt positions;

  /// Returns whether some position of the kernel has all taps inside, none in the padding.
  bool sees_whole_kernel() const {
    const c10::SymInt first = quotient_rounded_up(padding, stride);
    return first < positions && first * stride - padding + reach < size;
  }
};

/// Describes an axis of a convolution whose sizes fit each other. Axes are counted from the last one: 1, 2, 3.
Axis axis_of(const at::Tensor& input, const at::Tensor& weight, const Arguments& arguments, int64_t from_last) {
  const size_t index = arguments.stride.size() - from_last;
  const c10::SymInt &stride = arguments.stride[index], &padding = arguments.padding[index];
  const c10::SymInt reach = arguments.dilation[index] * (weight.sym_size(-from_last) - 1);
  const c10::SymInt size = input.sym_size(-from_last);
  if (arguments.output_padding.empty()) {
    return {size, stride, padding, reach, (size + 2 * padding - reach - 1) / stride + 1};
  }
  const c10::SymInt out = (size - 1) * stride - 2 * padding + reach + arguments.output_padding[index] + 1;
  return {out, stride, padding, reach, size};
}

/// Returns whether every position misses a part of the kernel along some axis. Without padding none does.
bool misses_kernel(const at::Tensor& input, const at::Tensor& weight, const Arguments& arguments) {
  const int64_t axes = arguments.stride.size();
  for (int64_t from_last = 1; from_last <= axes; ++from_last) {
    if (arguments.padding[axes - from_last] == 0) continue;
    if (!axis_of(input, weight, arguments, from_last).sees_whole_kernel()) return true;
  }
  return false;
}

/// Returns whether there are as many sizes and dimensions as there have to be, and all sizes are possible ones. What
/// does not fit is for PyTorch's operator to refuse.
bool fits(const at::Tensor& input, const at::Tensor& weight, const Arguments& arguments) {
  const size_t axes = arguments.stride.size();
  const auto dim = static_cast<size_t>(input.dim());
  if ((dim != axes + 1 && dim != axes + 2) || static_cast<size_t>(weight.dim()) != axes + 2) return false;
  if (arguments.padding.size() != axes || arguments.dilation.size() != axes) return false;
  const bool is_transposed = !arguments.output_padding.empty();
  if (is_transposed && arguments.output_padding.size() != axes) return false;
  for (size_t index = 0; index < axes; ++index) {
    if (arguments.stride[index] <= 0 || arguments.padding[index] < 0 || arguments.dilation[index] <= 0) return false;
    if (weight.sym_size(index + 2) <= 0) return false;
  }
  const c10::SymInt channels = input.sym_size(-static_cast<int64_t>(axes) - 1);
  if (arguments.groups <= 0 || weight.sym_size(0) <= 0 || weight.sym_size(0) % arguments.groups != 0) return false;
  return channels == (is_transposed ? weight.sym_size(0) : weight.sym_size(1) * arguments.groups);
}

/// Returns whether PyTorch accepts the other sizes, too: they are asked for only where something has to be mended.
bool is_accepted(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                 const Arguments& arguments) {
  const bool is_transposed = !arguments.output_padding.empty();
  for (int64_t from_last = 1; from_last <= static_cast<int64_t>(arguments.stride.size()); ++from_last) {
    const Axis axis = axis_of(input, weight, arguments, from_last);
    if (input.sym_size(-from_last) <= 0) return false;
    if (!is_transposed && axis.size + 2 * axis.padding <= axis.reach) return false;
    if (is_transposed) {
      const size_t index = arguments.stride.size() - from_last;
      const c10::SymInt& more = arguments.output_padding[index];
      if (axis.size <= 0 || more < 0 || (more >= axis.stride && more >= arguments.dilation[index])) return false;
    }
  }
  if (!bias || !bias->defined()) return true;
  const c10::SymInt channels = is_transposed ? weight.sym_size(1) * arguments.groups : weight.sym_size(0);
  return bias->dim() == 1 && bias->sym_size(0) == channels;
}

/// Returns whether a gradient of a tensor may be to come. For a tensor that torch.func has wrapped, another level of
/// its transforms may require one.
bool has_gradient_to_come(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet wrapped{c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched};
  return at::GradMode::is_enabled() && (tensor.requires_grad() || tensor.key_set().has_any(wrapped));
}

/// Returns whether an activation has a sample's dimension, and is channels-last.
bool is_in_format(const at::Tensor& input, const Arguments& arguments) {
  return static_cast<size_t>(input.dim()) == arguments.stride.size() + 2 && is_channels_last(input);
}

at::Tensor padded(const at::Tensor& input, const at::SymDimVector& padding) {
  at::SymDimVector sides;
  for (size_t index = padding.size(); index-- > 0;) sides.append(2, padding[index]);
  return at::constant_pad_nd_symint(input, sides, 0);
}

at::Tensor pytorchs(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                    const Arguments& arguments) {
  const auto& [stride, padding, dilation, groups, output_padding] = arguments;
  const bool is_3d = stride.size() == 3;
  if (!output_padding.empty()) {
    return is_3d ? at::conv_transpose3d_symint(input, weight, bias, stride, padding, output_padding, groups, dilation)
                 : at::conv_transpose2d_symint(input, weight, bias, stride, padding, output_padding, groups, dilation);
  }
  return is_3d ? at::conv3d_symint(input, weight, bias, stride, padding, dilation, groups)
               : at::conv2d_symint(input, weight, bias, stride, padding, dilation, groups);
}

/// Returns a function's result for an activation: in channels-last, and with a gradient in it, if the activation is.
template <typename Function>
at::Tensor in_format_of(const at::Tensor& input, const Arguments& arguments, const Function& function) {
  if (!is_in_format(input, arguments)) return function(input);
  return as_channels_last_output(function(with_channels_last_grad(input)));
}

/// The ways of 3D convolutions with one tap in the plane: 2D convolutions over views, or matrix products where depth
/// has one tap too. Kernels with more taps in the plane, or a stride there, gain nothing.
bool has_one_tap_in_the_plane(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                              const Arguments& arguments) {
  if (input.dim() != 5 || !is_composed(input) || !fits(input, weight, arguments)) return false;
  for (size_t index = 1; index < 3; ++index) {
    if (weight.sym_size(index + 2) != 1 || arguments.padding[index] != 0 || arguments.stride[index] != 1) return false;
  }
  // With groups, only these cases were faster when measured.
  const bool is_float = input.scalar_type() == at::kFloat;
  if (arguments.groups > 1 && (weight.sym_size(2) != 1 || !is_float)) return false;
  if (input.scalar_type() != weight.scalar_type() || !is_channels_last(input)) return false;
  if (bias && bias->defined() && bias->scalar_type() != input.scalar_type()) return false;
  return is_accepted(input, weight, bias, arguments);
}

/// Returns whether a convolution of one tap in the plane is one matrix product over all voxels, which is faster than a
/// convolution except for narrow types, and is as precise as PyTorch's settings require of convolutions.
bool is_linear(const at::Tensor& input, const at::Tensor& weight, const Arguments& arguments) {
  const bool is_wide = input.scalar_type() == at::kFloat || input.scalar_type() == at::kDouble;
  if (!is_wide || weight.sym_size(2) != 1 || arguments.stride[0] != 1 || arguments.padding[0] != 0 ||
      arguments.groups != 1) {
    return false;
  }
  const auto precision = [](at::Float32Op op) {
    return at::globalContext().float32Precision(at::Float32Backend::MKLDNN, op);
  };
  return precision(at::Float32Op::MATMUL) == precision(at::Float32Op::CONV);
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                       const Arguments& arguments);

/// Returns the convolution of a channels-last volume by a kernel with one tap in the plane.
at::Tensor along_depth(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                       const Arguments& arguments) {
  const at::Tensor kernel = with_same_layout_grad(weight);  // its views may get gradients in other strides
  const at::Tensor volume = with_channels_last_grad(input);
  if (is_linear(input, weight, arguments)) {
    return as_channels_last_output(channels_from_end(at::linear(channels_to_end(volume), kernel.flatten(1), bias)));
  }
  const Arguments in_columns = {
      {arguments.stride[0], 1}, {arguments.padding[0], 0}, {arguments.dilation[0], 1}, arguments.groups};
  const at::Tensor out = convolution(to_columns(volume), kernel.squeeze(4), bias, in_columns);
  return as_channels_last_output(from_columns(out, input.sym_size(4)));
}

/// Returns whether a channels-last volume is one sample, and PyTorch would not give it to oneDNN. Its rule of float32,
/// `ConvParams::use_mkldnn` in aten/src/ATen/native/Convolution.cpp, is made for the sizes of a 2D batch: of a 3D one
/// it takes batch, channels, depth and height. What it leaves is computed by matrix products over copies of the
/// input, 1.3 to 7 times slower. With groups, it leaves nothing.
bool is_slow_sample(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                    const Arguments& arguments) {
  if (input.dim() != 5 || input.sym_size(0) != 1 || input.scalar_type() != at::kFloat || !is_composed(input) ||
      !at::globalContext().userEnabledMkldnn() || !fits(input, weight, arguments) || !is_channels_last(input) ||
      !is_accepted(input, weight, bias, arguments)) {
    return false;
  }
  const auto& [stride, padding, dilation, groups, output_padding] = arguments;
  const bool is_transposed = !output_padding.empty();
  const at::SymDimVector none(3, 0);
  const auto backend =
      at::native::select_conv_backend(input, weight, bias, stride, padding, dilation, is_transposed,
                                      is_transposed ? output_padding : none, groups, /*bias_sizes_opt=*/std::nullopt);
  using Backend = at::native::ConvBackend;
  return backend == Backend::Slow3d || backend == Backend::SlowDilated3d || backend == Backend::SlowTranspose3d;
}

constexpr int64_t slabs = 2;  // which are a batch for oneDNN, however many threads share it

/// Returns whether a slow sample can be cut along the depth, and gains: a convolution between any two positions, a
/// transposed one where the outputs of its positions do not overlap. Cutting takes a tenth of a millisecond, and where
/// there are few positions, oneDNN spends its time on the weight. (Measured from 2 to 48 cubed, 4 to 512 channels.)
bool gains_from_slabs(const at::Tensor& input, const at::Tensor& weight, const Arguments& arguments) {
  const bool is_transposed = !arguments.output_padding.empty();
  c10::SymInt positions = 1;
  for (int64_t from_last = 1; from_last <= 3; ++from_last) {
    positions = positions * axis_of(input, weight, arguments, from_last).positions;
  }
  const Axis depth = axis_of(input, weight, arguments, 3);
  if (depth.positions < slabs || positions * weight.sym_numel() < 2'000'000) return false;
  if (!is_transposed) return positions >= 64;
  const bool is_apart = depth.reach + 1 == depth.stride && depth.padding == 0 && arguments.output_padding[0] == 0;
  return is_apart && positions >= 512;
}

/// Returns the convolution of one sample as that of a batch: slabs of it, with as much of the next one as the kernel
/// reaches. In channels-last the results lie one behind the other, so they are the whole without a copy.
at::Tensor in_slabs(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                    const Arguments& arguments) {
  const bool is_transposed = !arguments.output_padding.empty();
  const Axis depth = axis_of(input, weight, arguments, 3);
  const c10::SymInt positions = quotient_rounded_up(depth.positions, slabs);  // of each slab
  const c10::SymInt step = is_transposed ? positions : positions * depth.stride;
  const c10::SymInt size = is_transposed ? positions : (positions - 1) * depth.stride + depth.reach + 1;
  const c10::SymInt before = is_transposed ? c10::SymInt(0) : depth.padding;
  const c10::SymInt after = (slabs - 1) * step + size - before - input.sym_size(2);

  at::Tensor rows = channels_to_end(with_channels_last_grad(input)).squeeze(0);
  if (before != 0 || after != 0) rows = at::constant_pad_nd_symint(rows, {0, 0, 0, 0, 0, 0, before, after}, 0);
  const at::Tensor batch = at::cat({rows.narrow_symint(0, 0, size), rows.narrow_symint(0, step, size)});
  const at::Tensor cut = channels_from_end(batch.unflatten_symint(0, {slabs, size}));

  Arguments of_slab = arguments;
  if (!is_transposed) of_slab.padding[0] = 0;
  const at::Tensor out = channels_to_end(pytorchs(cut, weight, bias, of_slab)).flatten(0, 1);
  const c10::SymInt whole = is_transposed ? depth.size : depth.positions;
  return as_channels_last_output(channels_from_end(out.narrow_symint(0, 0, whole).unsqueeze(0)));
}

/// What has to change about a convolution so that PyTorch computes it right. The result stays the same.
struct Mending {
  bool narrows;  // the input to the columns under the kernel, whose width then needs no stride
  bool pads;     // the input, before the convolution
  bool slices;   // the input by the strides, before the convolution

  explicit operator bool() const { return narrows || pads || slices; }

  /// Changes the arguments, and returns the changed input.
  at::Tensor apply(at::Tensor input, const at::Tensor& weight, Arguments& arguments) const {
    auto& [stride, padding, dilation, groups, output_padding] = arguments;
    const size_t axes = stride.size();
    const bool is_channels_last_input = is_in_format(input, arguments);
    if (narrows) {
      const Axis width = axis_of(input, weight, arguments, 1);
      if (width.padding != 0) input = at::constant_pad_nd_symint(input, {width.padding, width.padding}, 0);
      input = input.narrow_symint(-1, 0, width.reach + 1);
      stride.back() = 1;
      padding.back() = 0;
    }
    if (pads) {
      input = padded(input, padding);
      padding.assign(axes, 0);
    }
    if (slices) {
      for (size_t index = 0; index < axes; ++index) {
        input = input.slice_symint(static_cast<int64_t>(index) - static_cast<int64_t>(axes), {}, {}, stride[index]);
      }
      stride.assign(axes, 1);
    }
    // A view may have any stride where its size is 1, and oneDNN goes by it: weight gradients were wrong.
    if (!narrows && !slices) return input;
    return is_channels_last_input ? to_channels_last(input)
                                  : input.contiguous().flatten().view_symint(input.sym_sizes());
  }
};

/// Returns whether a 2D kernel has one tap, strides, and so few channels that oneDNN computes it wrong.
bool has_strided_tap(const at::Tensor& weight, const Arguments& arguments) {
  if (arguments.stride.size() != 2 || weight.sym_size(2) != 1 || weight.sym_size(3) != 1) return false;
  return (arguments.stride[0] > 1 || arguments.stride[1] > 1) && weight.sym_size(1) < 16;
}

/// Returns what has to change about a convolution: only shapes, gradients to come and the machine are looked at.
Mending mending_of(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                   const Arguments& arguments) {
  const size_t axes = arguments.stride.size();
  if (!input.device().is_cpu() || static_cast<size_t>(weight.dim()) != axes + 2) return {};
  const ConvolutionFaults& faults = convolution_faults();
  if (!fits(input, weight, arguments)) return {};

  Mending mending = {};
  mending.narrows = faults.strided_columns && weight.sym_size(1) == 1 && arguments.stride.back() > 1 &&
                    axis_of(input, weight, arguments, 1).positions == 1;
  if (faults.small_inputs) {
    Arguments narrowed = arguments;
    if (mending.narrows) narrowed.padding.back() = 0;
    mending.pads = misses_kernel(input, weight, narrowed);
  }
  if (faults.strided_taps && has_strided_tap(weight, arguments) && has_gradient_to_come(weight)) {
    mending.slices = is_channels_last(weight) || is_in_format(input, arguments);
    mending.pads = mending.pads || (mending.slices && (arguments.padding[0] != 0 || arguments.padding[1] != 0));
  }
  return mending && is_accepted(input, weight, bias, arguments) ? mending : Mending{};
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                       const Arguments& arguments) {
  if (const Mending mending = mending_of(input, weight, bias, arguments)) {
    return in_format_of(input, arguments, [&](const at::Tensor& activation) {
      Arguments changed = arguments;
      const at::Tensor mended = mending.apply(activation, weight, changed);
      return convolution(mended, weight, bias, changed);
    });
  }
  if (arguments.stride.size() != 3) return pytorchs(input, weight, bias, arguments);
  if (has_one_tap_in_the_plane(input, weight, bias, arguments)) return along_depth(input, weight, bias, arguments);
  if (is_slow_sample(input, weight, bias, arguments) && gains_from_slabs(input, weight, arguments)) {
    return in_slabs(input, weight, bias, arguments);
  }
  return in_format_of(input, arguments,
                      [&](const at::Tensor& activation) { return pytorchs(activation, weight, bias, arguments); });
}

at::Tensor transposed_convolution(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                                  const Arguments& arguments) {
  const size_t axes = arguments.stride.size();
  const auto unchanged = [&] {
    if (axes != 3) return pytorchs(input, weight, bias, arguments);
    if (is_slow_sample(input, weight, bias, arguments) && gains_from_slabs(input, weight, arguments)) {
      return in_slabs(input, weight, bias, arguments);
    }
    return in_format_of(input, arguments,
                        [&](const at::Tensor& activation) { return pytorchs(activation, weight, bias, arguments); });
  };
  if (!input.device().is_cpu() || static_cast<size_t>(weight.dim()) != axes + 2) return unchanged();
  if (!fits(input, weight, arguments)) return unchanged();
  // The gradient of the input is a convolution, whose outputs may be wrong as others' are.
  const ConvolutionFaults& faults = convolution_faults();
  const bool widens =
      faults.strided_columns && weight.sym_size(1) == 1 && arguments.stride.back() > 1 && input.sym_size(-1) == 1;
  const bool cuts = faults.small_inputs && misses_kernel(input, weight, arguments);
  const auto& more = arguments.output_padding;
  const bool extends = faults.strided_taps && has_strided_tap(weight, arguments) && (more[0] > 0 || more[1] > 0) &&
                       has_gradient_to_come(weight);
  if ((!widens && !cuts && !extends) || !is_accepted(input, weight, bias, arguments)) return unchanged();

  const bool is_channels_last_input = is_in_format(input, arguments);
  at::Tensor activation = is_channels_last_input ? with_channels_last_grad(input) : input;
  if (widens) activation = at::constant_pad_nd_symint(activation, {0, 1}, 0);  // what it adds is cut off below
  Arguments whole = arguments;
  whole.padding.assign(axes, 0);
  if (extends) whole.output_padding.assign(axes, 0);
  const bool has_bias = bias && bias->defined();
  const at::Tensor uncut = pytorchs(activation, weight, extends ? OptionalTensor() : bias, whole);
  at::Tensor out = uncut;
  for (int64_t from_last = 1; from_last <= static_cast<int64_t>(axes); ++from_last) {
    const Axis axis = axis_of(input, weight, arguments, from_last);
    const c10::SymInt missing = axis.padding + axis.size - out.sym_size(-from_last);
    if (extends && missing > 0) {  // what the output padding would have added, which is nothing but the bias
      at::SymDimVector sides(2 * from_last, 0);
      sides.back() = missing;
      out = at::constant_pad_nd_symint(out, sides, 0);
    }
    out = out.narrow_symint(-from_last, axis.padding, axis.size);
  }
  if (extends && has_bias) out = out + bias->view({-1, 1, 1});
  if (is_channels_last_input || is_in_format(uncut, arguments)) return as_channels_last_output(out);
  return out.clone(at::MemoryFormat::Contiguous);
}

template <size_t axes>
at::Tensor by_numbers(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                      at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef dilation,
                      c10::SymInt groups) {
  return convolution(
      input, weight, bias,
      {for_each_axis(stride, axes), for_each_axis(padding, axes), for_each_axis(dilation, axes), std::move(groups)});
}

/// Convolves with a padding by name. Where "same" is one more at the end than at the beginning, PyTorch pads by that
/// one before it convolves.
template <size_t axes>
at::Tensor by_name(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                   at::SymIntArrayRef stride, c10::string_view padding, at::SymIntArrayRef dilation,
                   c10::SymInt groups) {
  const auto with_pytorch = [&](const at::Tensor& activation) {
    return axes == 3 ? at::conv3d_symint(activation, weight, bias, stride, padding, dilation, groups)
                     : at::conv2d_symint(activation, weight, bias, stride, padding, dilation, groups);
  };
  Arguments arguments = {for_each_axis(stride, axes), at::SymDimVector(axes, 0), for_each_axis(dilation, axes), groups};
  if (padding == "valid") return convolution(input, weight, bias, arguments);
  const bool is_strided =
      std::any_of(arguments.stride.begin(), arguments.stride.end(), [](const c10::SymInt& each) { return each != 1; });
  if (padding != "same" || is_strided || !fits(input, weight, arguments)) return with_pytorch(input);
  at::SymDimVector uneven;
  bool is_even = true;
  for (size_t index = axes; index-- > 0;) {
    const c10::SymInt both = arguments.dilation[index] * (weight.sym_size(index + 2) - 1);
    arguments.padding[index] = both / 2;
    uneven.append({0, both % 2});
    is_even = is_even && uneven.back() == 0;
  }
  if (is_even) return convolution(input, weight, bias, arguments);
  const auto evened = [&](const at::Tensor& activation) { return at::constant_pad_nd_symint(activation, uneven, 0); };
  if (!mending_of(evened(input), weight, bias, arguments)) return in_format_of(input, arguments, with_pytorch);
  return in_format_of(input, arguments, [&](const at::Tensor& activation) {
    return convolution(evened(activation), weight, bias, arguments);
  });
}

template <size_t axes>
at::Tensor transposed(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                      at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef output_padding,
                      c10::SymInt groups, at::SymIntArrayRef dilation) {
  return transposed_convolution(
      input, weight, bias,
      {for_each_axis(stride, axes), for_each_axis(padding, axes), for_each_axis(dilation, axes), std::move(groups),
       for_each_axis(output_padding, axes)});
}

/// Calls a 3D convolution in lower precision, as autocast does PyTorch's. The casts precede the views, whose casts
/// autocast would not cache. On other devices PyTorch's own operator is called.
template <typename Padding, at::Tensor (*convolve)(const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                                                   at::SymIntArrayRef, Padding, at::SymIntArrayRef, c10::SymInt)>
at::Tensor in_lower_precision(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                              at::SymIntArrayRef stride, Padding padding, at::SymIntArrayRef dilation,
                              c10::SymInt groups) {
  const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastCPU);
  const auto lower = [](const auto& tensor) {
    return at::autocast::cached_cast(at::autocast::get_lower_precision_fp_from_device_type(at::kCPU), tensor, at::kCPU);
  };
  return convolve(lower(input), lower(weight), lower(bias), stride, padding, dilation, std::move(groups));
}

void register_all(torch::Library& m) {
  m.impl("conv2d", TORCH_FN(by_numbers<2>));
  m.impl("conv2d.padding", TORCH_FN(by_name<2>));
  m.impl("conv3d", TORCH_FN(by_numbers<3>));
  m.impl("conv3d.padding", TORCH_FN(by_name<3>));
  m.impl("conv_transpose2d", TORCH_FN(transposed<2>));
  m.impl("conv_transpose3d", TORCH_FN(transposed<3>));
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { register_all(m); }
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) { register_all(m); }

TORCH_LIBRARY_IMPL(nhwc, AutocastCPU, m) {
  m.impl("conv3d", TORCH_FN((in_lower_precision<at::SymIntArrayRef, by_numbers<3>>)));
  m.impl("conv3d.padding", TORCH_FN((in_lower_precision<c10::string_view, by_name<3>>)));
}

}  // namespace nhwc
