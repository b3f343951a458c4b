#include "ops/convolution/call.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "layout/channels_last.h"

namespace nhwc {
namespace {

bool has_gradient_to_come(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet wrapped{c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched};
  return at::GradMode::is_enabled() && (tensor.requires_grad() || tensor.key_set().has_any(wrapped));
}

}  // namespace

at::SymDimVector for_each_axis(at::SymIntArrayRef sizes, size_t axes) {
  if (sizes.size() == 1) return at::SymDimVector(axes, sizes[0]);
  return at::SymDimVector(sizes.begin(), sizes.end());
}

c10::SymInt quotient_rounded_up(const c10::SymInt& number, const c10::SymInt& divisor) {
  return (number + divisor - 1) / divisor;
}

bool is_onednns(at::native::ConvBackend backend) {
  using Backend = at::native::ConvBackend;
  return backend == Backend::Mkldnn || backend == Backend::MkldnnTranspose || backend == Backend::MkldnnEmpty ||
         backend == Backend::Empty;
}

bool Axis::sees_whole_kernel() const {
  const c10::SymInt first = quotient_rounded_up(padding, stride);
  return first < positions && first * stride - padding + reach < size;
}

Axis Call::axis(int64_t from_last) const {
  const size_t index = axes() - from_last;
  const c10::SymInt &step = stride[index], &pad = padding[index];
  const c10::SymInt reach = dilation[index] * (weight.sym_size(-from_last) - 1);
  const c10::SymInt size = input.sym_size(-from_last);
  if (!is_transposed) return {size, step, pad, reach, (size + 2 * pad - reach - 1) / step + 1};
  return {(size - 1) * step - 2 * pad + reach + output_padding[index] + 1, step, pad, reach, size};
}

bool Call::is_on_cpu() const {
  const auto is_strided_on_cpu = [](const at::Tensor& tensor) {
    return tensor.device().is_cpu() && tensor.layout() == at::kStrided && !tensor.is_nested();
  };
  return is_strided_on_cpu(input) && is_strided_on_cpu(weight) && (!has_bias() || is_strided_on_cpu(*bias));
}

bool Call::has_one_dtype() const {
  const at::ScalarType type = input.scalar_type();
  return weight.scalar_type() == type && (!has_bias() || bias->scalar_type() == type);
}

bool Call::may_derive_by_input() const { return has_gradient_to_come(input); }

bool Call::may_derive_by_weight() const { return has_gradient_to_come(weight); }

bool Call::has_channels_last_weight() const { return is_channels_last(weight); }

bool Call::has_channels_last_input() const {
  return static_cast<size_t>(input.dim()) == axes() + 2 && is_channels_last(input);
}

bool Call::has_symbolic_sizes() const {
  const auto has_symbols = [](const at::Tensor& tensor) {
    return tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  };
  return has_symbols(input) || has_symbols(weight);
}

bool Call::is_accepted() const {
  const auto dim = static_cast<size_t>(input.dim());
  if ((dim != axes() + 1 && dim != axes() + 2) || static_cast<size_t>(weight.dim()) != axes() + 2) return false;
  for (const at::SymDimVector* each : {&padding, &dilation, &output_padding}) {
    if (each->size() != axes()) return false;
  }
  if (groups <= 0 || weight.sym_size(0) <= 0 || weight.sym_size(0) % groups != 0) return false;
  if (weight.sym_size(1) <= 0) return false;  // PyTorch has a result without elements
  const c10::SymInt channels = input.sym_size(-static_cast<int64_t>(axes()) - 1);
  if (channels != (is_transposed ? weight.sym_size(0) : weight.sym_size(1) * groups)) return false;
  for (size_t index = 0; index < axes(); ++index) {
    const auto from_last = static_cast<int64_t>(axes() - index);
    if (stride[index] <= 0 || padding[index] < 0 || dilation[index] <= 0) return false;
    constexpr int64_t most = 1 << 30;  // beyond which products of sizes may overflow
    if (stride[index] > most || padding[index] > most || dilation[index] > most) return false;
    if (weight.sym_size(-from_last) <= 0 || input.sym_size(-from_last) <= 0) return false;
    const Axis axis = this->axis(from_last);
    if (!is_transposed && axis.size + 2 * axis.padding <= axis.reach) return false;
    if (is_transposed) {
      const c10::SymInt& more = output_padding[index];
      if (axis.size <= 0 || more < 0 || (more >= axis.stride && more >= dilation[index])) return false;
    }
  }
  if (!has_bias()) return true;
  return bias->dim() == 1 && bias->sym_size(0) == (is_transposed ? weight.sym_size(1) * groups : weight.sym_size(0));
}

bool Call::misses_kernel() const {
  for (int64_t from_last = 1; from_last <= static_cast<int64_t>(axes()); ++from_last) {
    if (padding[axes() - from_last] != 0 && !axis(from_last).sees_whole_kernel()) return true;
  }
  return false;
}

bool Call::misses_input() const {
  const auto number = [](const c10::SymInt& size) { return size.guard_int(__FILE__, __LINE__); };
  for (int64_t from_last = 1; from_last <= static_cast<int64_t>(axes()); ++from_last) {
    const Axis along = axis(from_last);
    if (along.padding == 0 || along.sees_whole_kernel()) continue;
    const int64_t size = number(along.size), positions = number(along.positions), reach = number(along.reach),
                  step = number(dilation[axes() - from_last]);
    bool meets = false;
    for (int64_t position = 0; position < positions && !meets; ++position) {
      const int64_t first = position * number(along.stride) - number(along.padding);
      for (int64_t tap = first; tap <= first + reach && !meets; tap += step) meets = tap >= 0 && tap < size;
    }
    if (!meets) return true;
  }
  return false;
}

at::native::ConvBackend Call::backend() const {
  return at::native::select_conv_backend(input, weight, bias, stride, padding, dilation, is_transposed, output_padding,
                                         groups, /*bias_sizes_opt=*/std::nullopt);
}

at::Tensor Call::pytorchs() const {
  const bool is_3d = axes() == 3;
  if (is_transposed) {
    return is_3d ? at::conv_transpose3d_symint(input, weight, bias, stride, padding, output_padding, groups, dilation)
                 : at::conv_transpose2d_symint(input, weight, bias, stride, padding, output_padding, groups, dilation);
  }
  return is_3d ? at::conv3d_symint(input, weight, bias, stride, padding, dilation, groups)
               : at::conv2d_symint(input, weight, bias, stride, padding, dilation, groups);
}

}  // namespace nhwc
