// Cross entropy over the channels of a channels-last activation.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "activations/channels_last.h"
#include "torch_nhwc/ops.h"

namespace nhwc {
namespace {

bool is_probabilities(const at::Tensor& input, const at::Tensor& target) {
  return input.sym_sizes() == target.sym_sizes();
}

// Whether the arguments fit each other. All else, errors included, is PyTorch's own to answer.
bool is_composable(const at::Tensor& input, const at::Tensor& target, const std::optional<at::Tensor>& weight,
                   int64_t reduction, const c10::SymInt& ignore_index, double label_smoothing) {
  if (!is_channels_last(input) || !at::isFloatingType(input.scalar_type())) return false;
  if (reduction < at::Reduction::None || reduction > at::Reduction::Sum) return false;
  if (label_smoothing < 0 || label_smoothing > 1 || input.device() != target.device()) return false;
  if (weight && weight->defined() && (weight->dim() != 1 || weight->sym_size(0) != input.sym_size(1))) return false;
  if (is_probabilities(input, target)) return at::isFloatingType(target.scalar_type()) && ignore_index < 0;
  if (target.scalar_type() != at::kLong || target.dim() != input.dim() - 1) return false;
  for (int64_t dim = 0; dim < target.dim(); ++dim) {
    if (target.sym_size(dim) != input.sym_size(dim == 0 ? 0 : dim + 1)) return false;
  }
  return true;
}

// The steps are PyTorch's own, with the channels last throughout: `rows` are logarithms of probabilities.
at::Tensor of_probabilities(const at::Tensor& rows, const at::Tensor& target, const at::Tensor& weight,
                            int64_t reduction, double label_smoothing) {
  const c10::SymInt classes = rows.sym_size(-1);
  const at::Tensor probabilities = channels_to_end(target);
  at::Tensor products =
      rows * (label_smoothing > 0 ? probabilities * (1 - label_smoothing) + label_smoothing / classes : probabilities);
  if (weight.defined()) products = products * weight;
  if (reduction == at::Reduction::None) return -products.sum(-1);
  const at::Tensor sum = -products.sum();
  return reduction == at::Reduction::Sum ? sum : sum / (rows.sym_numel() / classes);
}

at::Tensor of_indices(const at::Tensor& rows, const at::Tensor& target, const at::Tensor& weight, int64_t reduction,
                      const c10::SymInt& ignore_index, double label_smoothing) {
  const c10::SymInt classes = rows.sym_size(-1);
  const at::Tensor flat = rows.reshape_symint({-1, classes}), indices = target.reshape(-1);
  const at::Tensor loss = at::nll_loss_symint(flat, indices, weight, reduction, ignore_index);
  const auto in_shape = [&](const at::Tensor& each) {
    return reduction == at::Reduction::None ? each.view_symint(target.sym_sizes()) : each;
  };
  if (label_smoothing == 0) return in_shape(loss);
  const at::Tensor ignored = indices == ignore_index;
  at::Tensor smooth = -(weight.defined() ? flat * weight : flat).sum(-1);
  smooth = smooth.masked_fill(ignored, 0.0);
  if (reduction != at::Reduction::None) smooth = smooth.sum();
  if (reduction == at::Reduction::Mean) {
    // By the weights of the classes that are there, as the first part.
    const at::Tensor counted = ignored.logical_not();
    smooth = smooth /
             (weight.defined() ? (weight.gather(0, indices.masked_fill(ignored, 0)) * counted).sum() : counted.sum());
  }
  return in_shape(loss * (1 - label_smoothing) + smooth * (label_smoothing / classes));
}

at::Tensor cross_entropy(const at::Tensor& input, const at::Tensor& target, const std::optional<at::Tensor>& weight,
                         int64_t reduction, c10::SymInt ignore_index, double label_smoothing) {
  if (!is_composable(input, target, weight, reduction, ignore_index, label_smoothing)) {
    return at::cross_entropy_loss_symint(input, target, weight, reduction, std::move(ignore_index), label_smoothing);
  }
  static const auto log_softmax =
      ops_detail::find<at::Tensor(const at::Tensor&, int64_t, std::optional<at::ScalarType>)>("nhwc::log_softmax");
  const at::Tensor weights = weight.value_or(at::Tensor());
  const at::Tensor rows = channels_to_end(log_softmax.call(input, 1, input.scalar_type()));
  return is_probabilities(input, target) ? of_probabilities(rows, target, weights, reduction, label_smoothing)
                                         : of_indices(rows, target, weights, reduction, ignore_index, label_smoothing);
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { m.impl("cross_entropy", TORCH_FN(cross_entropy)); }
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) { m.impl("cross_entropy", TORCH_FN(cross_entropy)); }

// As PyTorch's: in float32 on a CPU. On other devices it is its parts that autocast knows.
TORCH_LIBRARY_IMPL(nhwc, AutocastCPU, m) {
  m.impl("cross_entropy", [](const at::Tensor& input, const at::Tensor& target, const std::optional<at::Tensor>& weight,
                             int64_t reduction, c10::SymInt ignore_index, double label_smoothing) {
    const c10::impl::ExcludeDispatchKeyGuard off(c10::DispatchKey::AutocastCPU);
    const auto in_float32 = [](const auto& tensor) { return at::autocast::cached_cast(at::kFloat, tensor, at::kCPU); };
    return cross_entropy(in_float32(input), in_float32(target), in_float32(weight), reduction, std::move(ignore_index),
                         label_smoothing);
  });
}

}  // namespace nhwc
