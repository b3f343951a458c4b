// Pools of channels-last volumes, as two 2D pools over views. Windows are products of intervals, and so are their
// divisors: the results are those of one 3D pool, for all arguments, whichever axes come first.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include "cpu/pages.h"
#include "layout/channels_last.h"
#include "ops/autograd_node.h"
#include "ops/composition.h"

namespace nhwc {
namespace {

using Triple = std::array<int64_t, 3>;

// Returns whether the composition serves. PyTorch's own operator handles everything else, errors included.
bool is_volume(const at::Tensor& input) {
  return input.dim() == 5 && at::isFloatingType(input.scalar_type()) && is_channels_last(input);
}

// Returns whether a volume is contiguous, too, for which PyTorch's own pool is fast. It has none of half precision.
bool has_one_channel(const at::Tensor& volume) {
  return volume.sym_size(1) == 1 && !at::isReducedFloatingType(volume.scalar_type());
}

bool is_pytorchs(const at::Tensor& volume) { return !is_composed(volume) || has_one_channel(volume); }

// Returns the input of PyTorch's own pool: a volume of one channel in the strides of a contiguous one.
at::Tensor as_pytorchs(const at::Tensor& input) {
  const at::Tensor volume = with_channels_last_grad(input);
  return has_one_channel(volume) ? channels_to_end(volume).flatten(3).unsqueeze(1) : volume;
}

// Reads one number for all dimensions, or one for each. Returns nothing for arguments that PyTorch rejects.
std::optional<Triple> triple(at::IntArrayRef values) {
  if (values.size() == 1) return Triple{values[0], values[0], values[0]};
  if (values.size() == 3) return Triple{values[0], values[1], values[2]};
  return std::nullopt;
}

/// Applies a pool along depth and height, then one along width. PyTorch's kernels fill registers with channels, of
/// which the first pool has enough: its channels are the pixels of a row.
template <typename Planes, typename Rows>
at::Tensor separably(const at::Tensor& input, const Planes& across_rows, const Rows& along_rows) {
  const c10::SymInt channels = input.sym_size(1), width = input.sym_size(4);
  const at::Tensor rows = channels_from_end(channels_to_end(with_channels_last_grad(input)).flatten(3));
  const at::Tensor fewer = channels_to_end(across_rows(rows));  // `[N, D, H, W * C]`
  const at::Tensor pixels = channels_from_end(fewer.unflatten_symint(3, {width, channels}).flatten(1, 2));
  return as_channels_last_output(channels_from_end(
      channels_to_end(along_rows(pixels)).unflatten_symint(1, {fewer.sym_size(1), fewer.sym_size(2)})));
}

bool is_valid_window(const at::Tensor& input, const Triple& kernel, const Triple& stride, const Triple& padding) {
  for (size_t dim = 0; dim < 3; ++dim) {
    if (kernel[dim] <= 0 || stride[dim] <= 0 || padding[dim] < 0 || padding[dim] > kernel[dim] / 2) return false;
    if (input.sym_size(dim + 2) < kernel[dim]) return false;
  }
  return true;
}

/// An average pool of a volume whose arguments are valid.
struct AveragePool {
  Triple kernel, stride, padding;
  bool ceil_mode, count_include_pad;
  int64_t divisor;  // 0 is the size of a window

  // An explicit divisor divides once, along width.
  std::optional<int64_t> of_planes() const { return divisor == 0 ? std::nullopt : std::optional<int64_t>(1); }
  std::optional<int64_t> of_rows() const { return divisor == 0 ? std::nullopt : std::optional<int64_t>(divisor); }

  at::Tensor across_rows(const at::Tensor& rows) const {
    return at::avg_pool2d(rows, {kernel[0], kernel[1]}, {stride[0], stride[1]}, {padding[0], padding[1]}, ceil_mode,
                          count_include_pad, of_planes());
  }
  at::Tensor along_rows(const at::Tensor& pixels) const {
    return at::avg_pool2d(pixels, {1, kernel[2]}, {1, stride[2]}, {0, padding[2]}, ceil_mode, count_include_pad,
                          of_rows());
  }
  at::Tensor across_rows_backward(const at::Tensor& grad, const at::Tensor& rows) const {
    return at::avg_pool2d_backward(grad, rows, {kernel[0], kernel[1]}, {stride[0], stride[1]}, {padding[0], padding[1]},
                                   ceil_mode, count_include_pad, of_planes());
  }
  at::Tensor along_rows_backward(const at::Tensor& grad, const at::Tensor& pixels) const {
    return at::avg_pool2d_backward(grad, pixels, {1, kernel[2]}, {1, stride[2]}, {0, padding[2]}, ceil_mode,
                                   count_include_pad, of_rows());
  }
};

/// Returns the memory of an activation as another one, in channels-last as well.
at::Tensor as_activation(const at::Tensor& input, at::IntArrayRef sizes) {
  return as_new_channels_last(memory_of(to_channels_last(input), {input.numel()}), sizes);
}

const Formula average_formula = {
    "NhwcAvgPool3dBackward",
    [](const std::vector<at::Tensor>& gradients, const Formula::Context& context) -> std::vector<at::Tensor> {
      const at::Tensor &grad = gradients[0], &input = context.saved[0];
      if (!grad.defined() || !context.needed[0]) return {at::Tensor()};
      const auto& constants = context.constants;
      const auto sizes = [&](size_t index) {
        const auto values = constants[index].toIntVector();
        return Triple{values[0], values[1], values[2]};
      };
      const AveragePool pool = {
          sizes(0), sizes(1), sizes(2), constants[3].toBool(), constants[4].toBool(), constants[5].toInt()};
      if (at::GradMode::is_enabled() || !is_unobserved({grad, input})) {
        return {to_channels_last(at::avg_pool3d_backward(grad, input, pool.kernel, pool.stride, pool.padding,
                                                         pool.ceil_mode, pool.count_include_pad, pool.of_rows()))};
      }
      const int64_t samples = input.size(0), channels = input.size(1), width = input.size(4);
      const int64_t depth = grad.size(2), height = grad.size(3);
      // Only the sizes of what was pooled matter.
      const at::Tensor pixels = at::empty({samples, channels, depth * height, width},
                                          grad.options().memory_format(at::MemoryFormat::ChannelsLast));
      const at::Tensor of_pixels =
          pool.along_rows_backward(as_activation(grad, {samples, channels, depth * height, grad.size(4)}), pixels);
      const at::Tensor of_rows =
          pool.across_rows_backward(as_activation(of_pixels, {samples, width * channels, depth, height}),
                                    as_activation(input, {samples, width * channels, input.size(2), input.size(3)}));
      return {as_activation(of_rows, input.sizes())};
    }};

/// Computes an average pool below autograd, over the memory of its tensors, which takes a third of the time of views.
at::Tensor average_at_once(const at::Tensor& input, const AveragePool& pool) {
  at::Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    const int64_t samples = input.size(0), channels = input.size(1), width = input.size(4);
    const at::Tensor fewer =
        pool.across_rows(as_activation(input, {samples, width * channels, input.size(2), input.size(3)}));
    const int64_t depth = fewer.size(2), height = fewer.size(3);
    const at::Tensor pooled = pool.along_rows(as_activation(fewer, {samples, channels, depth * height, width}));
    out = as_activation(pooled, {samples, channels, depth, height, pooled.size(3)});
  }
  if (!needs_gradient(input)) return out;
  record(average_formula, out, input, input,
         {at::IntArrayRef(pool.kernel), at::IntArrayRef(pool.stride), at::IntArrayRef(pool.padding), pool.ceil_mode,
          pool.count_include_pad, pool.divisor});
  return out;
}

at::Tensor avg_pool3d(const at::Tensor& input, at::IntArrayRef kernel_size, at::IntArrayRef strides,
                      at::IntArrayRef paddings, bool ceil_mode, bool count_include_pad,
                      std::optional<int64_t> divisor_override) {
  const cpu::HugePages requested;
  const auto by_torch = [&](const at::Tensor& volume) {
    return at::avg_pool3d(volume, kernel_size, strides, paddings, ceil_mode, count_include_pad, divisor_override);
  };
  if (!is_volume(input)) return by_torch(input);
  if (is_pytorchs(input)) return as_channels_last_output(by_torch(as_pytorchs(input)));
  // The sum of a plane may overflow a half.
  if (divisor_override && input.scalar_type() == at::kHalf) return by_torch(input);
  const auto kernel = triple(kernel_size), stride = triple(strides.empty() ? kernel_size : strides),
             padding = triple(paddings);
  if (!kernel || !stride || !padding || !is_valid_window(input, *kernel, *stride, *padding) || divisor_override == 0) {
    return by_torch(input);
  }
  const AveragePool pool = {*kernel, *stride, *padding, ceil_mode, count_include_pad, divisor_override.value_or(0)};
  if (is_unobserved(input)) return average_at_once(input, pool);
  return separably(
      input, [&](const at::Tensor& rows) { return pool.across_rows(rows); },
      [&](const at::Tensor& pixels) { return pool.along_rows(pixels); });
}

at::Tensor adaptive_avg_pool3d(const at::Tensor& input, at::SymIntArrayRef output_size) {
  const cpu::HugePages requested;
  const auto by_torch = [&](const at::Tensor& volume) { return at::adaptive_avg_pool3d_symint(volume, output_size); };
  if (!is_volume(input)) return by_torch(input);
  if (is_pytorchs(input)) return as_channels_last_output(by_torch(as_pytorchs(input)));
  if (output_size.size() != 3 || output_size[0] <= 0 || output_size[1] <= 0 || output_size[2] <= 0) {
    return by_torch(input);
  }
  if (std::all_of(output_size.begin(), output_size.end(), [](const c10::SymInt& size) { return size == 1; })) {
    // The mean, because its gradient has the order of its dimensions.
    return as_channels_last_output(channels_from_end(channels_to_end(input).mean({1, 2, 3}, /*keepdim=*/true)));
  }
  return separably(
      input,
      [&](const at::Tensor& rows) { return at::adaptive_avg_pool2d_symint(rows, {output_size[0], output_size[1]}); },
      [&](const at::Tensor& pixels) {
        return at::adaptive_avg_pool2d_symint(pixels, {pixels.sym_size(2), output_size[2]});
      });
}

std::tuple<at::Tensor, at::Tensor> adaptive_max_pool3d(const at::Tensor& input, at::IntArrayRef output_size) {
  const cpu::HugePages requested;
  const auto size = triple(output_size);
  if (!is_volume(input) || !size || (*size)[0] <= 0 || (*size)[1] <= 0 || (*size)[2] <= 0) {
    return at::adaptive_max_pool3d(input, output_size);
  }
  if (is_pytorchs(input)) {
    const auto [values, indices] = at::adaptive_max_pool3d(as_pytorchs(input), output_size);
    return {as_channels_last_output(values), as_channels_last_output(indices)};
  }
  if (input.sym_size(1) <= 4 && !at::isReducedFloatingType(input.scalar_type())) {
    // PyTorch's own pool reads one channel after the other, but in any strides. Its gradient would be contiguous.
    const at::Tensor indices =
        as_channels_last_output(std::get<1>(at::adaptive_max_pool3d(input.detach(), output_size)));
    const at::Tensor voxels = channels_to_end(input).flatten(1, 3);
    const at::Tensor values = voxels.gather(1, channels_to_end(indices).flatten(1, 3)).unflatten(1, *size);
    return {as_channels_last_output(channels_from_end(values)), indices};
  }
  const auto [depth, height, width] = *size;
  const auto [in_plane, plane_indices] =
      at::adaptive_max_pool2d(to_planes(with_channels_last_grad(input)), {height, width});
  const at::Tensor columns = to_columns(from_planes(in_plane, input.sym_size(0)));
  const auto [values, column_indices] = at::adaptive_max_pool2d(columns, {depth, height * width});
  // An index of the second pool points to a maximum of the first one, by its plane and its place in the plane. Both
  // pools scan in the order of the 3D pool: among equal values they choose the same one.
  const at::Tensor chosen = channels_to_end(column_indices).flatten(1, 2);
  const at::Tensor places = channels_to_end(from_planes(plane_indices, input.sym_size(0))).flatten(1, 3);
  const at::Tensor planes = chosen.div(height * width, "floor");
  const at::Tensor indices = places.gather(1, chosen).add_(planes.mul(input.sym_size(3) * input.sym_size(4)));
  return {as_channels_last_output(from_columns(values, width)),
          as_channels_last_output(channels_from_end(indices.unflatten(1, {depth, height, width})))};
}

at::Tensor max_unpool3d(const at::Tensor& input, const at::Tensor& indices, at::SymIntArrayRef output_size,
                        at::IntArrayRef stride, at::IntArrayRef padding) {
  const cpu::HugePages requested;
  const auto by_torch = [&](const at::Tensor& volume) {
    return at::max_unpool3d_symint(volume, indices, output_size, stride, padding);
  };
  if (!is_volume(input)) return by_torch(input);
  if (is_pytorchs(input)) return as_channels_last_output(by_torch(as_pytorchs(input)));
  const bool is_valid =
      indices.scalar_type() == at::kLong && indices.sym_sizes() == input.sym_sizes() && output_size.size() == 3 &&
      stride.size() == 3 && padding.size() == 3 &&
      std::all_of(output_size.begin(), output_size.end(), [](const auto& size) { return size > 0; }) &&
      std::all_of(stride.begin(), stride.end(), [](int64_t step) { return step > 0; });
  if (!is_valid) return by_torch(input);
  // An index counts the voxels of the output, whose planes may as well be rows.
  const c10::SymInt &depth = output_size[0], &height = output_size[1], &width = output_size[2];
  const at::Tensor columns = to_columns(with_channels_last_grad(input));
  return as_channels_last_output(
      from_columns(at::max_unpool2d_symint(columns, to_columns(indices), {depth, height * width}), width));
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) {
  m.impl("avg_pool3d", TORCH_FN(avg_pool3d));
  m.impl("adaptive_avg_pool3d", TORCH_FN(adaptive_avg_pool3d));
  m.impl("adaptive_max_pool3d", TORCH_FN(adaptive_max_pool3d));
  m.impl("max_unpool3d", TORCH_FN(max_unpool3d));
}
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) {
  m.impl("avg_pool3d", TORCH_FN(avg_pool3d));
  m.impl("adaptive_avg_pool3d", TORCH_FN(adaptive_avg_pool3d));
  m.impl("adaptive_max_pool3d", TORCH_FN(adaptive_max_pool3d));
  m.impl("max_unpool3d", TORCH_FN(max_unpool3d));
}

// In float32 on a CPU, as PyTorch's. On other devices autocast does not change pools.
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
