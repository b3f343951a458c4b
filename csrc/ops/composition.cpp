#include "ops/composition.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <utility>

#include "layout/channels_last.h"
#include "layout/memory_format.h"
#include "ops/autograd_node.h"
#include "torch_nhwc/ops.h"

namespace nhwc {
namespace {

const Formula keep_format = {
    "ChannelsLastBackward",
    [](const std::vector<at::Tensor>& gradients, const Formula::Context& context) -> std::vector<at::Tensor> {
      if (!gradients[0].defined() || !context.needed[0]) return {at::Tensor()};
      return {to_channels_last(gradients[0])};
    }};

const Formula be_contiguous = {
    "ContiguousBackward",
    [](const std::vector<at::Tensor>& gradients, const Formula::Context& context) -> std::vector<at::Tensor> {
      if (!gradients[0].defined() || !context.needed[0]) return {at::Tensor()};
      const at::Tensor dense = gradients[0].contiguous();  // sizes of 1 may have any stride
      return {dense.reshape({-1}).view_symint(dense.sym_sizes())};
    }};

/// Returns an alias through which the gradient flows by the formula.
at::Tensor alias_of(const at::Tensor& input, const Formula& formula) {
  const bool is_below_autograd =
      c10::impl::tls_local_dispatch_key_set().excluded_.has_any(c10::autograd_dispatch_keyset);
  // A tangent would be lost below autograd; views carry it.
  if (is_below_autograd || !needs_gradient({input}) || has_tangent({input})) return input;
  at::Tensor alias;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    alias = input.alias();
  }
  // A composition saves the input's memory: the backward must see in-place changes of it.
  torch::autograd::impl::set_version_counter(alias, torch::autograd::impl::version_counter(input));
  record(formula, alias, {input}, {}, {});
  return alias;
}

}  // namespace

bool are_plain(at::ArrayRef<at::Tensor> tensors, bool is_compiled) {
  constexpr c10::DispatchKeySet transforms{c10::DispatchKey::Functionalize,    c10::DispatchKey::FuncTorchGradWrapper,
                                           c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched,
                                           c10::DispatchKey::Negative,         c10::DispatchKey::ZeroTensor};
  const auto others = is_compiled ? transforms : transforms.add(c10::DispatchKey::Python);
  return !has_tangent(tensors) && std::none_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
    return tensor.defined() && tensor.key_set().has_any(others);
  });
}

bool is_unobserved(at::ArrayRef<at::Tensor> tensors) {
  return are_plain(tensors) && !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

at::Tensor memory_of(const at::Tensor& dense, at::IntArrayRef sizes) {
  auto view = dense.unsafeGetTensorImpl()->shallow_copy_and_detach(/*version_counter=*/0,
                                                                   /*allow_tensor_metadata_change=*/true);
  view->set_sizes_contiguous(sizes);
  return at::Tensor(std::move(view));
}

at::Tensor without_memory(const at::Tensor& like, at::ScalarType dtype) {
  const c10::DispatchKeySet keys(c10::DispatchKey::CPU);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(keys, c10::scalarTypeToTypeMeta(dtype), at::kCPU);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  return tensor;
}

at::Tensor as_new_channels_last(at::Tensor memory, at::IntArrayRef sizes) {
  // The format stands for channels-last of any rank.
  memory.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, canonical_strides(sizes, at::MemoryFormat::ChannelsLast));
  return memory;
}

at::Tensor to_channels_last(const at::Tensor& input) {
  if (has_channels_last_strides(input)) return input;
  const bool is_moving = input.dim() >= 4 && input.is_contiguous() && !channels_to_end(input).is_contiguous();
  // Whether it is a weight or not, this is several times as fast as PyTorch's copy.
  if (is_moving && input.is_cpu() && is_unobserved(input)) {
    return convert_weight(input, input.dim() == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast);
  }
  // These views work under every transform, older batching included, which knows no `flatten`; the flat one gives sizes
  // of 1 their canonical strides.
  const at::Tensor dense = channels_to_end(input).contiguous();
  return channels_from_end(dense.reshape({-1}).view_symint(dense.sym_sizes()));
}

at::Tensor to_contiguous(const at::Tensor& input) {
  return input.contiguous().reshape({-1}).view_symint(input.sym_sizes());  // sizes of 1 may have any stride
}

at::Tensor with_canonical_strides(const at::Tensor& input) {
  return is_channels_last(input) ? to_channels_last(input) : to_contiguous(input);
}

at::Tensor with_channels_last_grad(const at::Tensor& input) { return alias_of(input, keep_format); }

at::Tensor with_same_layout_grad(const at::Tensor& weight) {
  if (is_channels_last(weight)) return with_channels_last_grad(weight);
  return weight.is_contiguous() ? alias_of(weight, be_contiguous) : weight;
}

at::Tensor as_channels_last_output(const at::Tensor& output) {
  const at::Tensor result = with_channels_last_grad(to_channels_last(output));
  // Without a gradient, the views of the composition have made it a view for autograd, of memory that nobody else has.
  if (result.is_view() && !result.requires_grad()) {
    const at::Tensor tangent = result._fw_grad(/*level=*/0);
    result.unsafeGetTensorImpl()->set_autograd_meta(nullptr);
    if (tangent.defined()) result._set_fw_grad(tangent, /*level=*/0, /*is_inplace_op=*/false);
  }
  return result;
}

at::Tensor to_planes(const at::Tensor& volume) { return channels_from_end(channels_to_end(volume).flatten(0, 1)); }

at::Tensor from_planes(const at::Tensor& planes, const c10::SymInt& samples) {
  return channels_from_end(channels_to_end(planes).unflatten_symint(0, {samples, planes.sym_size(0) / samples}));
}

at::Tensor to_columns(const at::Tensor& volume) { return channels_from_end(channels_to_end(volume).flatten(2, 3)); }

at::Tensor from_columns(const at::Tensor& columns, const c10::SymInt& width) {
  return channels_from_end(channels_to_end(columns).unflatten_symint(2, {columns.sym_size(3) / width, width}));
}

}  // namespace nhwc
