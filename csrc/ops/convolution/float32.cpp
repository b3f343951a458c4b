// Convolutions of half precision in float32, for CPUs whose oneDNN does not take them.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <array>
#include <vector>

#include "layout/channels_last.h"
#include "ops/autograd_node.h"
#include "ops/composition.h"
#include "ops/convolution/ways.h"

namespace nhwc {
namespace {

/// Returns PyTorch's result in float32, cast to the input's dtype and in its format.
at::Tensor computed(const Call& call) {
  Call wide = call;
  wide.input = call.input.to(at::kFloat);
  wide.weight = call.weight.to(at::kFloat);
  if (call.has_bias()) wide.bias = call.bias->to(at::kFloat);
  const at::Tensor out = wide.pytorchs().to(call.input.scalar_type());
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
  return std::none_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.defined() && tensor.key_set().has_any(others);
  });
}

std::vector<int64_t> as_numbers(const at::SymDimVector& sizes) {
  std::vector<int64_t> numbers;
  for (const c10::SymInt& size : sizes) numbers.push_back(size.expect_int());
  return numbers;
}

}  // namespace

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
