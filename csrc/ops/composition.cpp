#include "ops/composition.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/variable.h>

#include "activations/channels_last.h"
#include "ops/autograd_node.h"

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
      const at::Tensor dense = gradients[0].contiguous();  // with any strides where a size is 1
      return {dense.flatten().view_symint(dense.sym_sizes())};
    }};

/// The same memory, and the gradient that it hands on passes through the formula.
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
  // What a composition saves is the input's memory: a change of it in place must be seen by the backward.
  torch::autograd::impl::set_version_counter(alias, torch::autograd::impl::version_counter(input));
  record(formula, alias, {input}, {}, {});
  return alias;
}

}  // namespace

at::Tensor enter(const at::Tensor& input) { return alias_of(input, keep_format); }

at::Tensor enter_weight(const at::Tensor& weight) {
  if (is_channels_last(weight)) return enter(weight);
  return weight.is_contiguous() ? alias_of(weight, be_contiguous) : weight;
}

at::Tensor leave(const at::Tensor& output) { return enter(to_channels_last(output)); }

at::Tensor to_planes(const at::Tensor& volume) { return channels_from_end(channels_to_end(volume).flatten(0, 1)); }

at::Tensor from_planes(const at::Tensor& planes, const c10::SymInt& samples) {
  return channels_from_end(channels_to_end(planes).unflatten_symint(0, {samples, planes.sym_size(0) / samples}));
}

at::Tensor to_columns(const at::Tensor& volume) { return channels_from_end(channels_to_end(volume).flatten(2, 3)); }

at::Tensor from_columns(const at::Tensor& columns, const c10::SymInt& width) {
  return channels_from_end(channels_to_end(columns).unflatten_symint(2, {columns.sym_size(3) / width, width}));
}

}  // namespace nhwc
