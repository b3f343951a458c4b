// Padding and interpolation of channels-last activations by sums of rows, with their adjoint. Each is the derivative of
// the other. The operators above them are PyTorch's wherever no GPU has the kernel.
#include "cuda/resample.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/UpSample.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "layout/channels_last.h"
#include "ops/autograd_node.h"
#include "ops/composition.h"
#include "torch_nhwc/ops.h"

namespace nhwc {
namespace {

using cuda::ResampleAxis;
using cuda::ResampleMode;
using cuda::Resampling;
using Resample = at::Tensor(const at::Tensor&, c10::string_view, at::IntArrayRef, at::ArrayRef<double>);

const auto& native_resample() {
  static const auto op = ops_detail::find<Resample>("nhwc::native_resample");
  return op;
}

const auto& native_resample_backward() {
  static const auto op = ops_detail::find<Resample>("nhwc::native_resample_backward");
  return op;
}

constexpr const char* names_of_modes[cuda::resample_modes] = {"reflect",       "replicate", "circular",     "nearest",
                                                              "nearest-exact", "linear",    "align_corners"};

std::optional<ResampleMode> mode_of(c10::string_view name) {
  for (int mode = 0; mode < cuda::resample_modes; ++mode) {
    if (name == names_of_modes[mode]) return static_cast<ResampleMode>(mode);
  }
  return std::nullopt;
}

/// Returns the input's step for a step of the output, as PyTorch's CUDA kernels compute it in the type of the sums.
template <typename Real>
Real step_of(ResampleMode mode, int64_t in, int64_t out, double scale_factor) {
  if (mode == ResampleMode::align_corners) return out > 1 ? static_cast<Real>(in - 1) / static_cast<Real>(out - 1) : 0;
  if (scale_factor > 0) return static_cast<Real>(1.0 / scale_factor);
  return static_cast<Real>(in) / static_cast<Real>(out);
}

/// Returns whether every output index is padded from the input.
bool is_within(const ResampleAxis& axis) {
  const int64_t after = int64_t{axis.out} - axis.in - axis.before;
  const int64_t most = axis.mode == ResampleMode::reflect    ? axis.in - 1
                       : axis.mode == ResampleMode::circular ? axis.in
                                                             : axis.out;
  return axis.before >= 0 && after >= 0 && axis.before <= most && after <= most;
}

/// Returns the axes of a forward from an activation of these sizes. `parameters` are the padding before each dimension,
/// or scale factors, 0 where sizes say them.
Resampling resampling_of(ResampleMode mode, at::IntArrayRef in, at::IntArrayRef out, at::ArrayRef<double> parameters,
                         bool is_double, bool is_transposed) {
  Resampling resampling{};
  resampling.is_transposed = is_transposed;
  for (size_t axis = 0; axis < 3; ++axis) {
    const bool is_added = in.size() == 2 && axis == 1;
    const size_t dim = in.size() == 2 ? axis / 2 : axis;
    const int64_t size = is_added ? 1 : in[dim], result = is_added ? 1 : out[dim];
    const double parameter = is_added ? 0 : parameters[dim];
    ResampleAxis& of = resampling.axes[axis];
    of = {mode, static_cast<int32_t>(size), static_cast<int32_t>(result), 0, 0};
    if (is_padding(mode)) {
      of.before = static_cast<int32_t>(parameter);
    } else {
      const bool is_of_doubles = is_linear(mode) && is_double;
      of.scale = is_of_doubles ? step_of<double>(mode, size, result, parameter)
                               : step_of<float>(mode, size, result, parameter);
    }
  }
  return resampling;
}

/// Returns the sizes after the channels, which the operators take as numbers.
at::DimVector spatial_sizes(const at::Tensor& input) {
  at::DimVector sizes;
  for (int64_t dim = 2; dim < input.dim(); ++dim) sizes.push_back(input.sym_size(dim).guard_int(__FILE__, __LINE__));
  return sizes;
}

/// The checked arguments of the two operators. The input's sizes are the forward's, the size that is given is the
/// result's.
Resampling checked(const at::Tensor& input, c10::string_view name, at::IntArrayRef size,
                   at::ArrayRef<double> parameters, bool is_transposed) {
  const auto mode = mode_of(name);
  const auto dims = static_cast<int64_t>(size.size());
  TORCH_CHECK(mode.has_value(), "nhwc::native_resample: there is no mode '", name, "'");
  TORCH_CHECK((dims == 2 || dims == 3) && input.dim() == dims + 2 && parameters.size() == size.size(),
              "nhwc::native_resample: expected a size and a parameter for each dimension of an image or a volume, got ",
              size, " and ", parameters, " for one of shape ", input.sym_sizes());
  const at::DimVector own = spatial_sizes(input);
  for (const at::IntArrayRef each : {at::IntArrayRef(own), size}) {
    for (const int64_t length : each) {
      TORCH_CHECK(length > 0 && length < (1 << 20), "nhwc::native_resample: no size may be ", length);
    }
  }
  const bool is_double = c10::toRealValueType(input.scalar_type()) == at::kDouble;
  const Resampling resampling = is_transposed ? resampling_of(*mode, size, own, parameters, is_double, true)
                                              : resampling_of(*mode, own, size, parameters, is_double, false);
  TORCH_CHECK(!is_padding(*mode) || std::all_of(resampling.axes.begin(), resampling.axes.end(), is_within),
              "nhwc::native_resample: cannot pad ", own, " to ", size, " with ", parameters, " before, by ", name);
  return resampling;
}

/// Allocates channels-last memory for the result.
at::Tensor empty_resampled(const at::Tensor& input, at::IntArrayRef size) {
  c10::SymDimVector sizes{input.sym_size(0)};
  sizes.append(size.begin(), size.end());
  sizes.push_back(input.sym_size(1));
  return channels_from_end(at::empty_symint(sizes, input.options()));
}

/// Sums slices along one dimension, by operators that support batches.
at::Tensor sum_along(const at::Tensor& input, int64_t dim, const ResampleAxis& axis, bool is_transposed) {
  const int64_t count = is_transposed ? axis.in : axis.out, most = axis.most_asked(is_transposed, 1);
  const auto longs = at::TensorOptions().dtype(at::kLong);
  const at::Tensor indices = at::zeros({most, count}, longs), weights = at::zeros({most, count}, at::kDouble);
  auto index = indices.accessor<int64_t, 2>();
  auto weight = weights.accessor<double, 2>();
  int64_t used = 0;
  for (int32_t to = 0; to < count; ++to) {
    int64_t taps = 0;
    const auto add = [&](int32_t from, double of) {
      if (taps == most) return;
      index[taps][to] = from;
      weight[taps++][to] = of;
    };
    const auto visit = [&](auto real) {
      using Real = decltype(real);
      if (is_transposed) return axis.visit_transposed<Real>(to, add);
      const auto found = axis.taps<Real>(to);
      add(found.first, found.weight);
      if (found.has_next) add(found.first + 1, found.next_weight);
    };
    input.scalar_type() == at::kDouble || input.scalar_type() == at::kComplexDouble ? visit(0.0) : visit(0.0f);
    used = std::max(used, taps);
  }
  std::vector<int64_t> broadcast(input.dim(), 1);
  broadcast[dim] = count;
  at::Tensor sum;
  for (int64_t tap = 0; tap < used; ++tap) {
    at::Tensor part = input.index_select(dim, indices[tap].to(input.device()));
    if (is_transposed || is_linear(axis.mode)) {
      part = part * weights[tap].view(broadcast).to(input.device(), c10::toRealValueType(input.scalar_type()));
    }
    sum = tap == 0 ? part : sum + part;
  }
  return sum;
}

template <bool is_transposed>
at::Tensor composed_resample(const at::Tensor& input, c10::string_view mode, at::IntArrayRef size,
                             at::ArrayRef<double> parameters) {
  const Resampling resampling = checked(input, mode, size, parameters, is_transposed);
  const bool is_copy = !is_transposed && !is_linear(resampling.axes[0].mode);
  at::Tensor out = is_copy ? input : input.to(at::toOpMathType(input.scalar_type()));
  for (size_t i = 0; i < size.size(); ++i) {
    out = sum_along(out, static_cast<int64_t>(i) + 2, resampling.axes[size.size() == 2 ? 2 * i : i], is_transposed);
  }
  return out.to(input.scalar_type());
}

template <bool is_transposed>
at::Tensor resample_kernel(const at::Tensor& input, c10::string_view mode, at::IntArrayRef size,
                           at::ArrayRef<double> parameters) {
  const Resampling resampling = checked(input, mode, size, parameters, is_transposed);
  const at::Tensor out = empty_resampled(input, size);
  if (!cuda::can_resample(resampling, input)) {
    return out.copy_(composed_resample<is_transposed>(input, mode, size, parameters));
  }
  cuda::resample(resampling, to_channels_last(input.resolve_conj().resolve_neg()), out);
  return out;
}

template <bool is_transposed>
at::Tensor resample_meta(const at::Tensor& input, c10::string_view mode, at::IntArrayRef size,
                         at::ArrayRef<double> parameters) {
  checked(input, mode, size, parameters, is_transposed);
  return empty_resampled(input, size);
}

// The constants of the derivative: the mode, the sizes of the input, and the parameters.
template <const auto& op()>
std::vector<at::Tensor> derivative(const std::vector<at::Tensor>& gradients, const Formula::Context& context) {
  if (!gradients[0].defined() || !context.needed[0]) return {at::Tensor()};
  const auto& constants = context.constants;
  return {op().call(gradients[0], names_of_modes[constants[0].toInt()], constants[1].toIntVector(),
                    constants[2].toDoubleVector())};
}
const Formula transposed_resample = {"NhwcResampleBackward", derivative<native_resample_backward>};
const Formula twice_transposed_resample = {"NhwcResampleDoubleBackward", derivative<native_resample>};

// Both are linear: tangents are resampled like values.
template <const auto& op(), const Formula& formula>
at::Tensor resample_autograd(c10::DispatchKeySet keys, const at::Tensor& input, c10::string_view mode,
                             at::IntArrayRef size, at::ArrayRef<double> parameters) {
  at::Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = op().redispatch(keys & c10::after_autograd_keyset, input, mode, size, parameters);
  }
  if (needs_gradient({input})) {
    record(formula, out, {input}, {},
           {static_cast<int64_t>(*mode_of(mode)), at::IntArrayRef(spatial_sizes(input)).vec(), parameters.vec()});
  }
  const at::Tensor& tangent = input._fw_grad(/*level=*/0);
  if (tangent.defined()) {
    out._set_fw_grad(op().call(tangent, mode, size, parameters), /*level=*/0, /*is_inplace_op=*/false);
  }
  return out;
}

// --- The operators above ---

/// Returns the result by the kernel where it runs, forward and backward.
std::optional<at::Tensor> resampled(const at::Tensor& input, ResampleMode mode, at::IntArrayRef size,
                                    at::ArrayRef<double> parameters) {
  const at::IntArrayRef own = input.sizes().slice(2);
  const auto is_long = [](int64_t length) { return length <= 0 || length >= (1 << 20); };
  if (own == size || std::any_of(own.begin(), own.end(), is_long) || std::any_of(size.begin(), size.end(), is_long)) {
    return std::nullopt;
  }
  const bool is_double = c10::toRealValueType(input.scalar_type()) == at::kDouble;
  Resampling resampling = resampling_of(mode, own, size, parameters, is_double, false);
  if (is_padding(mode) && !std::all_of(resampling.axes.begin(), resampling.axes.end(), is_within)) return std::nullopt;
  if (!cuda::can_resample(resampling, input)) return std::nullopt;
  resampling.is_transposed = true;
  // Integers have no gradient.
  const bool has_gradient = input.is_floating_point() || input.is_complex();
  if (has_gradient && !cuda::can_resample(resampling, input)) return std::nullopt;
  return native_resample().call(input, names_of_modes[static_cast<int>(mode)], size, parameters);
}

/// Returns whether the kernel may be asked: for a channels-last image or volume on a GPU, with sizes that are numbers.
bool may_resample(const at::Tensor& input) {
  return input.is_cuda() && input.dim() >= 4 && input.dim() <= 5 &&
         !input.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && is_channels_last(input);
}

at::Tensor pad(const at::Tensor& input, at::SymIntArrayRef padding, c10::string_view name) {
  const auto mode = mode_of(name);
  const auto numbers = c10::asIntArrayRefSlowOpt(padding);
  if (may_resample(input) && mode && is_padding(*mode) && numbers &&
      static_cast<int64_t>(numbers->size()) == 2 * (input.dim() - 2)) {
    at::DimVector size(input.sizes().slice(2));
    c10::SmallVector<double, 3> before(size.size());
    for (size_t dim = 0; dim < size.size(); ++dim) {
      const size_t place = 2 * (size.size() - 1 - dim);
      before[dim] = static_cast<double>((*numbers)[place]);
      size[dim] += (*numbers)[place] + (*numbers)[place + 1];
    }
    if (auto result = resampled(input, *mode, size, before)) return *std::move(result);
  }
  if (name != "circular") return at::pad_symint(input, padding, name);
  using Circular = at::Tensor(const at::Tensor&, at::SymIntArrayRef);
  static const auto pad_circular = ops_detail::find<Circular>("nhwc::pad_circular");
  return pad_circular.call(input, padding);
}

at::Tensor interpolate_by_pytorch(const at::Tensor& input, at::OptionalSymIntArrayRef size,
                                  std::optional<at::ArrayRef<double>> scales, c10::string_view mode,
                                  bool align_corners) {
  const bool is_volume = input.dim() == 5;
  if (mode == "nearest") {
    return is_volume ? at::upsample_nearest3d_symint(input, size, scales)
                     : at::upsample_nearest2d_symint(input, size, scales);
  }
  if (mode == "nearest-exact") {
    return is_volume ? at::_upsample_nearest_exact3d_symint(input, size, scales)
                     : at::_upsample_nearest_exact2d_symint(input, size, scales);
  }
  TORCH_CHECK(mode == "bilinear" || mode == "trilinear", "nhwc::interpolate: there is no mode '", mode, "'");
  return mode == "trilinear" ? at::upsample_trilinear3d_symint(input, size, align_corners, scales)
                             : at::upsample_bilinear2d_symint(input, size, align_corners, scales);
}

at::Tensor interpolate(const at::Tensor& input, at::OptionalSymIntArrayRef size,
                       std::optional<at::ArrayRef<double>> scales, c10::string_view name, bool align_corners) {
  const bool is_linear = name == (input.dim() == 5 ? "trilinear" : "bilinear");
  const auto mode = is_linear ? align_corners ? ResampleMode::align_corners : ResampleMode::linear : mode_of(name);
  const auto numbers = size ? c10::asIntArrayRefSlowOpt(*size) : std::nullopt;
  // PyTorch's kernels take bytes, too, and no other integers.
  const bool is_theirs = input.is_complex() || !(input.is_floating_point() || input.scalar_type() == at::kByte);
  if (may_resample(input) && !is_theirs && (is_linear || (mode && !is_padding(*mode) && !cuda::is_linear(*mode))) &&
      size.has_value() == numbers.has_value() && size.has_value() != scales.has_value() &&
      (!size || static_cast<int64_t>(numbers->size()) == input.dim() - 2) &&
      (!scales || static_cast<int64_t>(scales->size()) == input.dim() - 2)) {
    const auto out = at::native::upsample::compute_output_size(
        input.sizes(), numbers ? at::OptionalIntArrayRef(*numbers) : std::nullopt, scales);
    c10::SmallVector<double, 3> factors(out.size());
    for (size_t dim = 0; dim < out.size(); ++dim) {
      // Of nearest images, a dimension of the same size stays as it is, whatever its factor.
      const bool stays = input.dim() == 4 && !is_linear && out[dim] == input.size(static_cast<int64_t>(dim) + 2);
      if (scales && !stays) factors[dim] = (*scales)[dim];
    }
    if (auto result = resampled(input, *mode, out, factors)) return *std::move(result);
  }
  return interpolate_by_pytorch(input, size, scales, name, align_corners);
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeExplicitAutograd, m) {
  m.impl("native_resample", TORCH_FN(resample_kernel<false>));
  m.impl("native_resample_backward", TORCH_FN(resample_kernel<true>));
}
TORCH_LIBRARY_IMPL(nhwc, Meta, m) {
  m.impl("native_resample", TORCH_FN(resample_meta<false>));
  m.impl("native_resample_backward", TORCH_FN(resample_meta<true>));
}
TORCH_LIBRARY_IMPL(nhwc, Autograd, m) {
  m.impl("native_resample", TORCH_FN((resample_autograd<native_resample, transposed_resample>)));
  m.impl("native_resample_backward",
         TORCH_FN((resample_autograd<native_resample_backward, twice_transposed_resample>)));
}
TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) {
  m.impl("pad", TORCH_FN(pad));
  m.impl("interpolate", TORCH_FN(interpolate));
}
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) {
  m.impl("native_resample", TORCH_FN(composed_resample<false>));
  m.impl("native_resample_backward", TORCH_FN(composed_resample<true>));
  m.impl("pad", TORCH_FN(pad));
  m.impl("interpolate", TORCH_FN(interpolate));
}

}  // namespace nhwc
