#include "ops/convolution/volumes.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include <array>
#include <vector>

#include "layout/channels_last.h"
#include "ops/autograd_node.h"
#include "ops/composition.h"
#include "ops/convolution/passes.h"
#include "ops/convolution/rewriting.h"

namespace nhwc::volumes {
namespace {

constexpr int64_t slabs = 2;  // which are a batch for oneDNN, however many threads share it

/// Returns whether PyTorch's settings require the same precision of matrix products and of convolutions.
bool is_as_precise_as_products() {
  const auto precision = [](at::Float32Op op) {
    const at::Float32Precision set = at::globalContext().float32Precision(at::Float32Backend::MKLDNN, op);
    return set == at::Float32Precision::NONE ? at::Float32Precision::IEEE : set;
  };
  return precision(at::Float32Op::MATMUL) == precision(at::Float32Op::CONV);
}

/// Returns whether a channels-last volume is one sample, and PyTorch would not give it to oneDNN. Its rule of float32,
/// `ConvParams::use_mkldnn` in aten/src/ATen/native/Convolution.cpp, is made for the sizes of a 2D batch: of a 3D one
/// it takes batch, channels, depth and height. What it leaves is computed by matrix products over copies of the
/// input, 1.3 to 7 times slower. With groups, it leaves nothing. The same is true of half precision in float32. Graphs
/// for any sizes have PyTorch's convolution: Inductor cannot order strides that are symbols, which the views here have.
bool is_slow_sample(const Call& call) {
  if (call.axes() != 3 || call.has_symbolic_sizes() || call.input.sym_size(0) != 1 || call.groups != 1 ||
      !is_channels_last(call.input) || !at::globalContext().userEnabledMkldnn()) {
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

}  // namespace

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

/// Returns whether a convolution is one matrix product over all voxels, which is faster than a convolution except for
/// narrow types.
bool is_linear(const Call& call) {
  const bool is_wide = call.input.scalar_type() == at::kFloat || call.input.scalar_type() == at::kDouble;
  return is_wide && has_one_tap_in_the_plane(call) && call.weight.sym_size(2) == 1 && call.stride[0] == 1 &&
         call.padding[0] == 0 && call.groups == 1 && is_as_precise_as_products();
}

namespace {

/// The memory of a pointwise convolution's tensors as matrices: rows of voxels, and outputs by inputs.
at::Tensor rows_of(const at::Tensor& volume) {
  return memory_of(to_channels_last(volume), {volume.numel() / volume.size(1), volume.size(1)});
}
at::Tensor matrix_of(const at::Tensor& weight) {
  return memory_of(weight.contiguous(), {weight.size(0), weight.size(1)});
}

const Formula linear_formula = {
    "NhwcLinearBackward",
    [](const std::vector<at::Tensor>& gradients, const Formula::Context& context) -> std::vector<at::Tensor> {
      const at::Tensor &grad = gradients[0], &input = context.saved[0], &weight = context.saved[1];
      const auto& needed = context.needed;
      if (!grad.defined()) return std::vector<at::Tensor>(3);
      if (at::GradMode::is_enabled() || !is_unobserved({grad, input, weight})) {
        const at::SymDimVector ones(3, 1), zeros(3, 0);
        return composed_gradients({input, weight, {}, ones, zeros, ones, 1, zeros}, grad,
                                  {needed[0], needed[1], needed[2]});
      }
      const at::Tensor rows = rows_of(grad);
      std::vector<at::Tensor> found(3);
      if (needed[0]) found[0] = as_new_channels_last(rows.mm(matrix_of(weight)), input.sizes());
      if (needed[1]) {
        const at::Tensor product = rows.t().mm(rows_of(input));
        found[1] = has_channels_last_strides(weight) ? as_new_channels_last(product, weight.sizes())
                                                     : memory_of(product, weight.sizes());
      }
      if (needed[2]) found[2] = rows.sum(0);
      return found;
    }};

/// Computes a pointwise convolution below autograd, by one call of PyTorch's, which takes half the time of the views.
at::Tensor linear_at_once(const Call& call, const std::array<at::Tensor, 3>& tensors) {
  at::Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    at::DimVector sizes(call.input.sizes());
    sizes[1] = call.weight.size(0);
    out = as_new_channels_last(at::linear(rows_of(call.input), matrix_of(call.weight), call.bias), sizes);
  }
  if (needs_gradient(tensors)) record(linear_formula, out, tensors, {call.input, call.weight}, {});
  return out;
}

}  // namespace

at::Tensor linear(const Call& call) {
  const std::array<at::Tensor, 3> tensors = {call.input, call.weight, call.bias.value_or(at::Tensor())};
  if (call.may_use_kernels && !call.is_compiled && is_unobserved(tensors)) return linear_at_once(call, tensors);
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
    for (at::SymDimVector* each : {&columns.stride, &columns.padding, &columns.dilation, &columns.output_padding}) {
      each->pop_back();
    }
    return from_columns(convolution(columns), volume.input.sym_size(4));
  });
}

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

/// Computes one matrix product of the weight as it stands and the windows of the kernel, gathered into rows.
at::Tensor gathered(const Call& call) {
  const at::Tensor kernel = with_same_layout_grad(call.weight);
  return changed(call, [&](const Call& whole) {
    at::Tensor windows = channels_to_end(padded(whole.input, whole.padding));  // `[1, D, H, W, C]`
    // All taps are copied at once, except where their gradients would be added one number after the other.
    const bool has_gradient = at::GradMode::is_enabled() && windows.requires_grad();
    for (int64_t dim = 0; dim < 3; ++dim) {
      const Axis axis = call.axis(3 - dim);
      const c10::SymInt &stride = axis.stride, &dilation = call.dilation[dim];
      if (has_gradient) {
        std::vector<at::Tensor> taps;
        for (c10::SymInt first = 0; first <= axis.reach; first = first + dilation) {
          taps.push_back(windows.slice_symint(dim + 1, first, first + (axis.positions - 1) * stride + 1, stride));
        }
        windows = at::stack(taps, -1);
      } else {
        const auto as_int = [](const c10::SymInt& size) { return size.guard_int(__FILE__, __LINE__); };
        windows = windows.unfold(dim + 1, as_int(axis.reach + 1), as_int(stride)).slice_symint(-1, {}, {}, dilation);
      }
    }
    windows = windows.permute({0, 1, 2, 3, 5, 6, 7, 4});
    const at::Tensor rows = windows.flatten(4).flatten(0, 3), weights = channels_to_end(kernel).flatten(1);
    // In this order products of few rows are faster.
    const at::Tensor products = whole.has_bias() ? at::addmm(whole.bias->unsqueeze(1), weights, rows.t())
                                                 : at::mm(weights, rows.t());  // `[out, D * H * W]`
    return products.view_symint(
        {1, call.weight.sym_size(0), windows.sym_size(1), windows.sym_size(2), windows.sym_size(3)});
  });
}

}  // namespace nhwc::volumes
