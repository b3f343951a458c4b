// Circular padding of channels-last activations, and its adjoint. Each is the derivative of the other.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu/pages.h"
#include "layout/channels_last.h"
#include "ops/autograd_node.h"
#include "torch_nhwc/ops.h"

namespace nhwc {
namespace {

using Signature = at::Tensor(const at::Tensor&, at::IntArrayRef);

const auto& native_pad_circular() {
  static const auto op = ops_detail::find<Signature>("nhwc::native_pad_circular");
  return op;
}

const auto& native_pad_circular_backward() {
  static const auto op = ops_detail::find<Signature>("nhwc::native_pad_circular_backward");
  return op;
}

// The padding before and after one dimension; a negative number crops.
struct Border {
  int64_t dim, before, after;
  int64_t added_before() const { return std::max<int64_t>(before, 0); }
  int64_t added_after() const { return std::max<int64_t>(after, 0); }
  int64_t taken_before() const { return std::max<int64_t>(-before, 0); }
  int64_t taken_after() const { return std::max<int64_t>(-after, 0); }
};

// Lists the borders from the last dimension to the first, as `pad` does.
std::vector<Border> borders(const at::Tensor& tensor, at::IntArrayRef pad) {
  const size_t spatial = tensor.dim() < 3 ? 0 : static_cast<size_t>(tensor.dim()) - 2;
  TORCH_CHECK(spatial > 0 && pad.size() % 2 == 0 && pad.size() <= 2 * spatial,
              "nhwc::native_pad_circular: expected two numbers for each spatial dimension of an activation, got ", pad,
              " for one of shape ", tensor.sym_sizes());
  std::vector<Border> result;
  for (size_t i = 0; i < pad.size(); i += 2) {
    result.push_back({tensor.dim() - 1 - static_cast<int64_t>(i) / 2, pad[i], pad[i + 1]});
  }
  return result;
}

// Allocates channels-last memory for the padded tensor (`sign` 1), or for the tensor before the padding (-1).
at::Tensor empty_padded(const at::Tensor& tensor, at::IntArrayRef pad, int sign) {
  c10::SymDimVector sizes(tensor.sym_sizes());
  for (const Border& border : borders(tensor, pad)) sizes[border.dim] += sign * (border.before + border.after);
  std::rotate(sizes.begin() + 1, sizes.begin() + 2, sizes.end());
  return channels_from_end(at::empty_symint(sizes, tensor.options()));
}

// `middle` is the part of a padded tensor that comes from the input, `kept` that part of the input; in one dimension.
at::Tensor middle(const at::Tensor& padded, const Border& border) {
  return padded.narrow(border.dim, border.added_before(),
                       padded.size(border.dim) - border.added_before() - border.added_after());
}
at::Tensor kept(const at::Tensor& input, const Border& border) {
  return input.narrow(border.dim, border.taken_before(),
                      input.size(border.dim) - border.taken_before() - border.taken_after());
}

at::Tensor middle(at::Tensor padded, at::ArrayRef<Border> all) {
  for (const Border& border : all) padded = middle(padded, border);
  return padded;
}
at::Tensor kept(at::Tensor input, at::ArrayRef<Border> all) {
  for (const Border& border : all) input = kept(input, border);
  return input;
}

// Calls `visit(repeat, original)` for every part that repeats another, in an order in which parts can be written: the
// borders of one dimension repeat what earlier dimensions have written.
template <typename Visit>
void visit_repeats(const at::Tensor& padded, const Border& border, at::ArrayRef<Border> later, const Visit& visit) {
  const at::Tensor part = middle(padded, later);
  const int64_t size = part.size(border.dim);
  if (border.before > 0) {
    visit(part.narrow(border.dim, 0, border.before),
          part.narrow(border.dim, size - border.added_after() - border.before, border.before));
  }
  if (border.after > 0) {
    visit(part.narrow(border.dim, size - border.after, border.after),
          part.narrow(border.dim, border.added_before(), border.after));
  }
}

at::Tensor pad_kernel(const at::Tensor& input, at::IntArrayRef pad) {
  const cpu::HugePages requested;
  const std::vector<Border> all = borders(input, pad);
  const at::Tensor out = empty_padded(input, pad, 1);
  middle(out, all).copy_(kept(input, all));
  for (size_t i = 0; i < all.size(); ++i) {
    visit_repeats(out, all[i], at::ArrayRef<Border>(all).slice(i + 1),
                  [](const at::Tensor& repeat, const at::Tensor& original) { repeat.copy_(original); });
  }
  return out;
}

at::Tensor pad_backward_kernel(const at::Tensor& grad, at::IntArrayRef pad) {
  const cpu::HugePages requested;
  const std::vector<Border> all = borders(grad, pad);
  const at::Tensor sums = empty_padded(grad, {}, 1).copy_(grad);
  for (size_t i = all.size(); i-- > 0;) {
    visit_repeats(sums, all[i], at::ArrayRef<Border>(all).slice(i + 1),
                  [](const at::Tensor& repeat, const at::Tensor& original) { original.add_(repeat); });
  }
  const at::Tensor out = empty_padded(grad, pad, -1);
  if (std::any_of(pad.begin(), pad.end(), [](int64_t added) { return added < 0; })) out.zero_();
  kept(out, all).copy_(middle(sums, all));
  return out;
}

// The same with operators that support batches.
at::Tensor composed(const at::Tensor& input, at::IntArrayRef pad) {
  const std::vector<Border> all = borders(input, pad);
  at::Tensor out = kept(input, all);
  for (const Border& border : all) {
    const int64_t size = out.size(border.dim);
    out = at::cat({out.narrow(border.dim, size - border.added_before(), border.added_before()), out,
                   out.narrow(border.dim, 0, border.added_after())},
                  border.dim);
  }
  return out;
}

at::Tensor composed_backward(const at::Tensor& grad, at::IntArrayRef pad) {
  const std::vector<Border> all = borders(grad, pad);
  at::Tensor sums = grad;
  for (size_t i = all.size(); i-- > 0;) {
    const Border& border = all[i];
    const at::Tensor inner = middle(sums, border);
    const int64_t size = inner.size(border.dim), end = sums.size(border.dim);
    // Each border, padded with zeros, is added to the end that it repeats.
    std::vector<int64_t> before(2 * (grad.dim() - border.dim)), after = before;
    before[before.size() - 2] = size - border.added_before();
    after[after.size() - 1] = size - border.added_after();
    sums = inner + at::constant_pad_nd(sums.narrow(border.dim, 0, border.added_before()), before) +
           at::constant_pad_nd(sums.narrow(border.dim, end - border.added_after(), border.added_after()), after);
  }
  std::vector<int64_t> taken;
  for (const int64_t added : pad) taken.push_back(std::max<int64_t>(-added, 0));
  return at::constant_pad_nd(sums, taken);
}

const Formula fold = {
    "ChannelsLastPadCircularBackward",
    [](const std::vector<at::Tensor>& gradients, const Formula::Context& context) -> std::vector<at::Tensor> {
      if (!gradients[0].defined() || !context.needed[0]) return {at::Tensor()};
      return {native_pad_circular_backward().call(gradients[0], context.constants[0].toIntVector())};
    }};
const Formula unfold = {
    "ChannelsLastPadCircularDoubleBackward",
    [](const std::vector<at::Tensor>& gradients, const Formula::Context& context) -> std::vector<at::Tensor> {
      if (!gradients[0].defined() || !context.needed[0]) return {at::Tensor()};
      return {native_pad_circular().call(gradients[0], context.constants[0].toIntVector())};
    }};

// Both are linear: tangents are padded like values.
template <const auto& op(), const Formula& formula>
at::Tensor with_autograd(c10::DispatchKeySet keys, const at::Tensor& input, at::IntArrayRef pad) {
  at::Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = op().redispatch(keys & c10::after_autograd_keyset, input, pad);
  }
  if (needs_gradient({input})) record(formula, out, {input}, {}, {pad.vec()});
  const at::Tensor& tangent = input._fw_grad(/*level=*/0);
  if (tangent.defined()) out._set_fw_grad(op().call(tangent, pad), /*level=*/0, /*is_inplace_op=*/false);
  return out;
}

// Returns whether no border is longer than the input. PyTorch's own operator handles everything else, errors included.
bool is_composable(const at::Tensor& input, at::SymIntArrayRef pad) {
  if (!is_channels_last(input) || static_cast<int64_t>(pad.size()) != 2 * (input.dim() - 2)) return false;
  for (size_t i = 0; i < pad.size(); i += 2) {
    const c10::SymInt &before = pad[i], &after = pad[i + 1];
    c10::SymInt left = input.sym_size(input.dim() - 1 - static_cast<int64_t>(i) / 2);
    if (before < 0) left = left + before;
    if (after < 0) left = left + after;
    if (left <= 0 || before > left || after > left) return false;
  }
  return true;
}

at::Tensor pad_circular(const at::Tensor& input, at::SymIntArrayRef pad) {
  if (!is_composable(input, pad)) return at::pad_symint(input, pad, "circular");
  return native_pad_circular().call(input, C10_AS_INTARRAYREF_SLOW(pad));
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeExplicitAutograd, m) {
  m.impl("native_pad_circular", TORCH_FN(pad_kernel));
  m.impl("native_pad_circular_backward", TORCH_FN(pad_backward_kernel));
}
TORCH_LIBRARY_IMPL(nhwc, Meta, m) {
  m.impl("native_pad_circular",
         [](const at::Tensor& input, at::IntArrayRef pad) { return empty_padded(input, pad, 1); });
  m.impl("native_pad_circular_backward",
         [](const at::Tensor& grad, at::IntArrayRef pad) { return empty_padded(grad, pad, -1); });
}
TORCH_LIBRARY_IMPL(nhwc, Autograd, m) {
  m.impl("native_pad_circular", TORCH_FN((with_autograd<native_pad_circular, fold>)));
  m.impl("native_pad_circular_backward", TORCH_FN((with_autograd<native_pad_circular_backward, unfold>)));
}
TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { m.impl("pad_circular", TORCH_FN(pad_circular)); }
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) {
  m.impl("native_pad_circular", TORCH_FN(composed));
  m.impl("native_pad_circular_backward", TORCH_FN(composed_backward));
  m.impl("pad_circular", TORCH_FN(pad_circular));
}

}  // namespace nhwc
