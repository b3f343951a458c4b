#include "ops/convolution/float32.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <array>
#include <numeric>
#include <vector>

#include "layout/channels_last.h"
#include "ops/autograd_node.h"
#include "ops/composition.h"
#include "ops/convolution/faults.h"

namespace nhwc {
namespace {

// The rules of what oneDNN 3.12 computes wrong were found by 33,000 random convolutions with and without AMX, half of
// them by reading its sources, too. The larger side is the input, of transposed convolutions the output.

/// Returns whether AMX multiplies by weights whose taps were packed as if each had 32 channels: one along the width (or
/// along the height of a kernel without width), or those that a stride folds into channels.
bool is_packed_wrong(const Call& call, int64_t channels) {
  if (channels % 2 != 0 || channels >= 32) return false;
  const auto number = [](const c10::SymInt& size) { return size.guard_int(__FILE__, __LINE__); };
  const auto is_packed = [&](int64_t taps) { return channels * taps > 32 && channels * taps % 32 == 0; };
  const Axis width = call.axis(1);
  const int64_t kernel = number(call.weight.sym_size(-1)), stride = number(width.stride);
  if (call.dilation.back() == 1 && channels < 16 && is_packed(kernel)) return true;
  if (call.axes() == 2 && kernel == 1 && channels < 16 && call.dilation[0] == 1 && call.dilation[1] == 1 &&
      is_packed(number(call.weight.sym_size(2))) && (width.positions > 48 || width.positions % 16 == 0)) {
    return true;
  }
  if (call.groups != 1 || width.padding != 0 || call.dilation.back() != 1 || stride == 1) return false;
  const int64_t divisor = std::gcd(std::gcd(kernel, stride), number(width.size));
  for (int64_t folded = 2; folded <= divisor; ++folded) {
    if (divisor % folded == 0 && is_packed(folded)) return true;
  }
  return false;
}

/// Returns whether AMX skips more rows or planes than its copy of the input has room for.
bool skips_too_far(const Call& call) {
  bool has_taps_or_padding = false, skips = false;
  for (size_t index = 0; index < call.axes(); ++index) {
    const c10::SymInt kernel = call.weight.sym_size(static_cast<int64_t>(index) + 2);
    has_taps_or_padding = has_taps_or_padding || kernel != 1 || call.padding[index] != 0;
    skips = skips || (index + 1 < call.axes() && call.stride[index] > kernel);
  }
  return has_taps_or_padding && skips;
}

/// Returns whether PyTorch's result or a gradient is wrong.
bool is_wrong(const Call& call) {
  const ConvolutionFaults& faults = convolution_faults();
  if (!faults.halves) return false;
  const Axis width = call.axis(1);
  if (width.stride > 1 && width.padding > width.positions) return true;
  const c10::SymInt channels = call.weight.sym_size(1);
  const bool is_depthwise = call.groups > 1 && channels == 1 && call.weight.sym_size(0) == call.groups;
  const bool is_dilated =
      std::any_of(call.dilation.begin(), call.dilation.end(), [](const c10::SymInt& each) { return each > 1; });
  if (is_depthwise && is_dilated && call.input.scalar_type() == at::kBFloat16) return true;
  if (!faults.halves_with_amx) return false;
  if (call.is_transposed && call.axes() == 3 && call.output_padding[0] > call.padding[0]) return true;
  return is_packed_wrong(call, channels.guard_int(__FILE__, __LINE__)) || skips_too_far(call);
}

/// Returns PyTorch's result in float32, cast to the input's dtype and in its format.
at::Tensor computed(const Call& call) {
  const auto wide = [](const at::Tensor& tensor) { return tensor.to(at::kFloat); };
  const OptionalTensor bias = call.has_bias() ? OptionalTensor(wide(*call.bias)) : OptionalTensor();
  const at::SymDimVector none(call.axes(), 0);
  const at::Tensor out =
      at::convolution_symint(wide(call.input), wide(call.weight), bias, call.stride, call.padding, call.dilation,
                             call.is_transposed, call.is_transposed ? call.output_padding : none, call.groups)
          .to(call.input.scalar_type());
  return call.is_channels_last_input() ? to_channels_last(out) : out;
}

const Formula in_float32 = {
    "NhwcFloat32ConvolutionBackward",
    [](const std::vector<at::Tensor>& gradients, const Formula::Context& context) -> std::vector<at::Tensor> {
      if (!gradients[0].defined()) return std::vector<at::Tensor>(3);
      const at::Tensor &input = context.saved[0], &weight = context.saved[1];
      const auto numbers = [&](size_t index) { return context.constants[index].toIntVector(); };
      const std::vector<int64_t> channels = {gradients[0].size(1)};
      auto [of_input, of_weight, of_bias] = at::convolution_backward(
          gradients[0].to(at::kFloat), input.to(at::kFloat), weight.to(at::kFloat), at::OptionalIntArrayRef(channels),
          numbers(0), numbers(1), numbers(2), context.constants[3].toBool(), numbers(4), context.constants[5].toInt(),
          {context.needed[0], context.needed[1], context.needed[2]});
      const auto cast = [&](const at::Tensor& gradient) {
        return gradient.defined() ? gradient.to(input.scalar_type()) : gradient;
      };
      of_input = cast(of_input);
      if (of_input.defined() && is_channels_last(input)) of_input = to_channels_last(of_input);
      return {of_input, cast(of_weight), cast(of_bias)};
    }};

/// Returns whether the tensors are plain ones: transforms, compilers and subclasses see a composition.
bool are_plain(at::ArrayRef<at::Tensor> tensors) {
  constexpr c10::DispatchKeySet others{c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                       c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched};
  return std::none_of(tensors.begin(), tensors.end(),
                      [&](const at::Tensor& tensor) { return tensor.defined() && tensor.key_set().has_any(others); });
}

std::vector<int64_t> as_numbers(const at::SymDimVector& sizes) {
  std::vector<int64_t> numbers;
  for (const c10::SymInt& size : sizes) numbers.push_back(size.expect_int());
  return numbers;
}

}  // namespace

bool needs_float32(const Call& call) {
  const at::ScalarType type = call.input.scalar_type();
  if (type != at::kBFloat16 && type != at::kHalf) return false;
  if (call.weight.scalar_type() != type || (call.has_bias() && call.bias->scalar_type() != type)) return false;
  // PyTorch's own product of what oneDNN does not take is 8 to 160 times slower than a convolution in float32.
  return !is_onednns(call.backend()) || is_wrong(call);
}

at::Tensor by_float32(const Call& call) {
  const std::array<at::Tensor, 3> inputs = {call.input, call.weight, call.bias.value_or(at::Tensor())};
  if (!needs_gradient(inputs) || !are_plain(inputs) || has_tangent(inputs)) return computed(call);
  at::Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = computed(call);
  }
  const at::SymDimVector none(call.axes(), 0);
  record(in_float32, out, inputs, {call.input, call.weight},
         {as_numbers(call.stride), as_numbers(call.padding), as_numbers(call.dilation), call.is_transposed,
          as_numbers(call.is_transposed ? call.output_padding : none), call.groups.expect_int()});
  return out;
}

}  // namespace nhwc
