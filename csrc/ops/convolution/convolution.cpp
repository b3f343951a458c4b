// The operators of convolutions, whose numbers are right where PyTorch's are not on a CPU, and which are fast where
// PyTorch's are slow on channels-last.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "ops/convolution/ways.h"

namespace nhwc {
namespace {

template <size_t axes>
Call by_numbers(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef dilation,
                const c10::SymInt& groups) {
  return {input,
          weight,
          bias,
          for_each_axis(stride, axes),
          for_each_axis(padding, axes),
          for_each_axis(dilation, axes),
          groups,
          at::SymDimVector(axes, 0)};
}

template <size_t axes>
Call transposed(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef output_padding,
                const c10::SymInt& groups, at::SymIntArrayRef dilation) {
  Call call = by_numbers<axes>(input, weight, bias, stride, padding, dilation, groups);
  call.is_transposed = true;
  call.output_padding = for_each_axis(output_padding, axes);
  return call;
}

template <size_t axes>
at::Tensor convolve(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                    at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef dilation,
                    c10::SymInt groups) {
  return convolution(by_numbers<axes>(input, weight, bias, stride, padding, dilation, groups));
}

/// Returns the call that a padding by name means; nothing where PyTorch refuses it. Where "same" is one more at the end
/// than at the beginning, the input is padded by that one, as PyTorch does.
template <size_t axes>
std::optional<Call> by_name(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                            at::SymIntArrayRef stride, c10::string_view padding, at::SymIntArrayRef dilation,
                            const c10::SymInt& groups) {
  Call call = by_numbers<axes>(input, weight, bias, stride, at::SymDimVector(axes, 0), dilation, groups);
  if (padding == "valid") return call;
  const bool is_strided =
      std::any_of(call.stride.begin(), call.stride.end(), [](const c10::SymInt& each) { return each != 1; });
  if (padding != "same" || is_strided || weight.dim() != axes + 2 || call.dilation.size() != axes) return {};
  at::SymDimVector uneven;
  for (size_t index = axes; index-- > 0;) {
    const c10::SymInt both = call.dilation[index] * (weight.sym_size(index + 2) - 1);
    call.padding[index] = both / 2;
    uneven.append({0, both % 2});
  }
  const bool is_even = std::all_of(uneven.begin(), uneven.end(), [](const c10::SymInt& each) { return each == 0; });
  if (!is_even) call.input = at::constant_pad_nd_symint(input, uneven, 0);
  return call;
}

template <size_t axes, bool is_compiled = false>
at::Tensor convolve_by_name(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                            at::SymIntArrayRef stride, c10::string_view padding, at::SymIntArrayRef dilation,
                            c10::SymInt groups) {
  auto call = by_name<axes>(input, weight, bias, stride, padding, dilation, groups);
  if (call) call->is_compiled = is_compiled;
  if (call && call->is_accepted()) return convolution(*call);
  return axes == 3 ? at::conv3d_symint(input, weight, bias, stride, padding, dilation, groups)
                   : at::conv2d_symint(input, weight, bias, stride, padding, dilation, groups);
}

template <size_t axes>
at::Tensor convolve_transposed(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                               at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef output_padding,
                               c10::SymInt groups, at::SymIntArrayRef dilation) {
  return convolution(transposed<axes>(input, weight, bias, stride, padding, output_padding, groups, dilation));
}

/// Returns a convolution of any kind; an output padding makes it a transposed one.
Call of_any_kind(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                 at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef dilation,
                 const c10::SymInt& groups, at::OptionalSymIntArrayRef output_padding) {
  const bool is_3d = weight.dim() == 5;
  if (output_padding) {
    const auto make = is_3d ? transposed<3> : transposed<2>;
    return make(input, weight, bias, stride, padding, *output_padding, groups, dilation);
  }
  const auto make = is_3d ? by_numbers<3> : by_numbers<2>;
  return make(input, weight, bias, stride, padding, dilation, groups);
}

/// Returns the name of the way that a convolution takes.
std::string convolution_way(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                            at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef dilation,
                            c10::SymInt groups, at::OptionalSymIntArrayRef output_padding) {
  return way_of(of_any_kind(input, weight, bias, stride, padding, dilation, groups, output_padding)).name;
}

/// Computes a convolution in a compiled graph, which sees PyTorch's operators and those of opaque.h.
at::Tensor compiled(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                    at::SymIntArrayRef stride, at::SymIntArrayRef padding, at::SymIntArrayRef dilation,
                    c10::SymInt groups, at::OptionalSymIntArrayRef output_padding) {
  Call call = of_any_kind(input, weight, bias, stride, padding, dilation, groups, output_padding);
  call.is_compiled = true;
  return convolution(call);
}

std::string convolution_way_by_name(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                                    at::SymIntArrayRef stride, c10::string_view padding, at::SymIntArrayRef dilation,
                                    c10::SymInt groups) {
  const auto make = weight.dim() == 5 ? by_name<3> : by_name<2>;
  const auto call = make(input, weight, bias, stride, padding, dilation, groups);
  return call ? way_of(*call).name : "unfit";
}

at::Tensor compiled_by_name(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias,
                            at::SymIntArrayRef stride, c10::string_view padding, at::SymIntArrayRef dilation,
                            c10::SymInt groups) {
  const auto convolve = weight.dim() == 5 ? convolve_by_name<3, true> : convolve_by_name<2, true>;
  return convolve(input, weight, bias, stride, padding, dilation, std::move(groups));
}

/// Calls an operator in lower precision, as autocast does PyTorch's convolutions. The casts precede the views, whose
/// casts autocast would not cache.
template <typename Result, typename... Others>
struct Lowered {
  template <Result (*operation)(const at::Tensor&, const at::Tensor&, const OptionalTensor&, Others...)>
  static Result call(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, Others... others) {
    const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastCPU);
    const auto lower = [](const auto& tensor) {
      const at::ScalarType dtype = at::autocast::get_lower_precision_fp_from_device_type(at::kCPU);
      return at::autocast::cached_cast(dtype, tensor, at::kCPU);
    };
    return operation(lower(input), lower(weight), lower(bias), std::forward<Others>(others)...);
  }
};

void register_all(torch::Library& m) {
  m.impl("conv2d", TORCH_FN(convolve<2>));
  m.impl("conv2d.padding", TORCH_FN(convolve_by_name<2>));
  m.impl("conv3d", TORCH_FN(convolve<3>));
  m.impl("conv3d.padding", TORCH_FN(convolve_by_name<3>));
  m.impl("conv_transpose2d", TORCH_FN(convolve_transposed<2>));
  m.impl("conv_transpose3d", TORCH_FN(convolve_transposed<3>));
  m.impl("compiled_convolution", TORCH_FN(compiled));
  m.impl("compiled_convolution.padding", TORCH_FN(compiled_by_name));
  m.impl("convolution_way", TORCH_FN(convolution_way));
  m.impl("convolution_way.padding", TORCH_FN(convolution_way_by_name));
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { register_all(m); }
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) { register_all(m); }

TORCH_LIBRARY_IMPL(nhwc, AutocastCPU, m) {
  using Sizes = at::SymIntArrayRef;
  using ByNumbers = Lowered<at::Tensor, Sizes, Sizes, Sizes, c10::SymInt>;
  using ByName = Lowered<at::Tensor, Sizes, c10::string_view, Sizes, c10::SymInt>;
  using Transposed = Lowered<at::Tensor, Sizes, Sizes, Sizes, c10::SymInt, Sizes>;
  using Compiled = Lowered<at::Tensor, Sizes, Sizes, Sizes, c10::SymInt, at::OptionalSymIntArrayRef>;
  using Way = Lowered<std::string, Sizes, Sizes, Sizes, c10::SymInt, at::OptionalSymIntArrayRef>;
  using WayByName = Lowered<std::string, Sizes, c10::string_view, Sizes, c10::SymInt>;
  m.impl("conv2d", TORCH_FN((ByNumbers::call<convolve<2>>)));
  m.impl("conv2d.padding", TORCH_FN((ByName::call<convolve_by_name<2>>)));
  m.impl("conv3d", TORCH_FN((ByNumbers::call<convolve<3>>)));
  m.impl("conv3d.padding", TORCH_FN((ByName::call<convolve_by_name<3>>)));
  m.impl("conv_transpose2d", TORCH_FN((Transposed::call<convolve_transposed<2>>)));
  m.impl("conv_transpose3d", TORCH_FN((Transposed::call<convolve_transposed<3>>)));
  m.impl("compiled_convolution", TORCH_FN((Compiled::call<compiled>)));
  m.impl("compiled_convolution.padding", TORCH_FN((ByName::call<compiled_by_name>)));
  m.impl("convolution_way", TORCH_FN((Way::call<convolution_way>)));
  m.impl("convolution_way.padding", TORCH_FN((WayByName::call<convolution_way_by_name>)));
}

}  // namespace nhwc
