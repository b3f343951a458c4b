// Pools of volumes that lie channels-last, as two pools of planes over views. Windows are products of intervals, and so
// are their divisors: the results are those of the one pool, for every argument.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>

#include "activations/channels_last.h"
#include "ops/composition.h"
#include "torch_nhwc/ops.h"

namespace nhwc {
namespace {

using Triple = std::array<int64_t, 3>;

// Whether a composition gives what PyTorch gives. All else, errors included, is PyTorch's own to answer.
bool is_volume(const at::Tensor& input) {
  return input.dim() == 5 && at::isFloatingType(input.scalar_type()) && is_channels_last(input);
}

// One number for all dimensions, or one for each; nothing where PyTorch would complain.
std::optional<Triple> triple(at::IntArrayRef values) {
  if (values.size() == 1) return Triple{values[0], values[0], values[0]};
  if (values.size() == 3) return Triple{values[0], values[1], values[2]};
  return std::nullopt;
}

bool is_valid_window(const at::Tensor& input, const Triple& kernel, const Triple& stride, const Triple& padding) {
  for (size_t dim = 0; dim < 3; ++dim) {
    if (kernel[dim] <= 0 || stride[dim] <= 0 || padding[dim] < 0 || padding[dim] > kernel[dim] / 2) return false;
    if (input.sym_size(dim + 2) < kernel[dim]) return false;
  }
  return true;
}

at::Tensor avg_pool3d(const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef strides,
                      at::IntArrayRef paddings, bool ceil_mode, bool count_include_pad,
                      std::optional<int64_t> divisor_override) {
  const auto by_torch = [&](const at::Tensor& volume) {
    return at::avg_pool3d(volume, kernel_size, strides, paddings, ceil_mode, count_include_pad, divisor_override);
  };
  if (!is_volume(input)) return by_torch(input);
  if (!is_composed(input)) return leave(by_torch(enter(input)));
  // The sum of a plane may be more than a half can be.
  if (divisor_override && input.scalar_type() == at::kHalf) return by_torch(input);
  const auto kernel = triple(kernel_size), stride = triple(strides.empty() ? kernel_size : strides),
             padding = triple(paddings);
  if (!kernel || !stride || !padding || !is_valid_window(input, *kernel, *stride, *padding) || divisor_override == 0) {
    return by_torch(input);
  }
  const auto [kernel_d, kernel_h, kernel_w] = *kernel;
  const auto [stride_d, stride_h, stride_w] = *stride;
  const auto [padding_d, padding_h, padding_w] = *padding;
  // A divisor that is given divides once, along depth.
  const std::optional<int64_t> sum = divisor_override ? std::optional<int64_t>(1) : std::nullopt;
  return separably(
      input,
      [&](const at::Tensor& planes) {
        return at::avg_pool2d(planes, {kernel_h, kernel_w}, {stride_h, stride_w}, {padding_h, padding_w}, ceil_mode,
                              count_include_pad, sum);
      },
      [&](const at::Tensor& columns) {
        return at::avg_pool2d(columns, {kernel_d, 1}, {stride_d, 1}, {padding_d, 0}, ceil_mode, count_include_pad,
                              divisor_override);
      });
}

at::Tensor adaptive_avg_pool3d(const at::Tensor& input, at::SymIntArrayRef output_size) {
  const auto by_torch = [&](const at::Tensor& volume) { return at::adaptive_avg_pool3d_symint(volume, output_size); };
  if (!is_volume(input)) return by_torch(input);
  if (!is_composed(input)) return leave(by_torch(enter(input)));
  if (std::all_of(output_size.begin(), output_size.end(), [](const c10::SymInt& size) { return size == 1; })) {
    // A mean, whose gradient is spread in the order of its dimensions.
    return to_channels_last(channels_from_end(channels_to_end(input).mean({1, 2, 3}, /*keepdim=*/true)));
  }
  if (output_size.size() != 3 || output_size[0] <= 0 || output_size[1] <= 0 || output_size[2] <= 0) {
    return by_torch(input);
  }
  return separably(
      input,
      [&](const at::Tensor& planes) {
        return at::adaptive_avg_pool2d_symint(planes, {output_size[1], output_size[2]});
      },
      [&](const at::Tensor& columns) {
        return at::adaptive_avg_pool2d_symint(columns, {output_size[0], columns.sym_size(3)});
      });
}

std::tuple<at::Tensor, at::Tensor> adaptive_max_pool3d(const at::Tensor& input, at::IntArrayRef output_size) {
  const auto size = triple(output_size);
  if (!is_volume(input) || !size || (*size)[0] <= 0 || (*size)[1] <= 0 || (*size)[2] <= 0) {
    return at::adaptive_max_pool3d(input, output_size);
  }
  if (!is_composed(input)) {
    const auto [values, indices] = at::adaptive_max_pool3d(enter(input), output_size);
    return {leave(values), to_channels_last(indices)};
  }
  const auto [depth, height, width] = *size;
  const auto [in_plane, plane_indices] = at::adaptive_max_pool2d(to_planes(enter(input)), {height, width});
  const at::Tensor columns = to_columns(from_planes(in_plane, input.sym_size(0)));
  const auto [values, column_indices] = at::adaptive_max_pool2d(columns, {depth, height * width});
  // An index of the second pool names a maximum of the first one, by its plane and its place in there. Both pools scan
  // in the order in which the one would: of equal ones it is the same that counts.
  const at::Tensor chosen = channels_to_end(column_indices).flatten(1, 2);
  const at::Tensor places = channels_to_end(from_planes(plane_indices, input.sym_size(0))).flatten(1, 3);
  const at::Tensor planes = chosen.div(height * width, "floor");
  const at::Tensor indices = places.gather(1, chosen).add_(planes.mul(input.sym_size(3) * input.sym_size(4)));
  return {leave(from_columns(values, width)),
          to_channels_last(channels_from_end(indices.unflatten(1, {depth, height, width})))};
}

at::Tensor lp_pool3d(const at::Tensor& input, double norm_type, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                     bool ceil_mode) {
  static const auto pool =
      ops_detail::find<at::Tensor(const at::Tensor&, at::IntArrayRef, at::IntArrayRef, at::IntArrayRef, bool, bool,
                                  std::optional<int64_t>)>("nhwc::avg_pool3d");
  const bool keeps_format = is_volume(input);
  const at::Tensor powers = keeps_format ? to_channels_last(enter(input).pow(norm_type)) : input.pow(norm_type);
  const at::Tensor mean = pool.call(powers, kernel_size, stride, {0, 0, 0}, ceil_mode, true, {});
  const Triple kernel = triple(kernel_size).value();  // else the pool has complained
  const at::Tensor sum = (mean.sign() * mean.abs().relu()).mul(kernel[0] * kernel[1] * kernel[2]);
  return keeps_format ? leave(sum.pow(1.0 / norm_type)) : sum.pow(1.0 / norm_type);
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) {
  m.impl("avg_pool3d", TORCH_FN(avg_pool3d));
  m.impl("adaptive_avg_pool3d", TORCH_FN(adaptive_avg_pool3d));
  m.impl("adaptive_max_pool3d", TORCH_FN(adaptive_max_pool3d));
  m.impl("lp_pool3d", TORCH_FN(lp_pool3d));
}
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) {
  m.impl("avg_pool3d", TORCH_FN(avg_pool3d));
  m.impl("adaptive_avg_pool3d", TORCH_FN(adaptive_avg_pool3d));
  m.impl("adaptive_max_pool3d", TORCH_FN(adaptive_max_pool3d));
  m.impl("lp_pool3d", TORCH_FN(lp_pool3d));
}

// As PyTorch's: in float32 on a CPU. On other devices autocast leaves pools alone.
TORCH_LIBRARY_IMPL(nhwc, AutocastCPU, m) {
  m.impl("avg_pool3d",
         [](const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef stride, at::IntArrayRef padding,
            bool ceil_mode, bool count_include_pad, std::optional<int64_t> divisor_override) {
           const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastCPU);
           return nhwc::avg_pool3d(at::autocast::cached_cast(at::kFloat, input, c10::DeviceType::CPU), kernel_size,
                                   stride, padding, ceil_mode, count_include_pad, divisor_override);
         });
  m.impl("adaptive_avg_pool3d", [](const at::Tensor& input, at::SymIntArrayRef output_size) {
    const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastCPU);
    return nhwc::adaptive_avg_pool3d(at::autocast::cached_cast(at::kFloat, input, c10::DeviceType::CPU), output_size);
  });
  m.impl("adaptive_max_pool3d", [](const at::Tensor& input, at::IntArrayRef output_size) {
    const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastCPU);
    return nhwc::adaptive_max_pool3d(at::autocast::cached_cast(at::kFloat, input, c10::DeviceType::CPU), output_size);
  });
}

}  // namespace nhwc
