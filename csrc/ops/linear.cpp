// Linear layers in half precision, by way of float32 where oneDNN does not take the dtype: PyTorch's own loops take
// many times as long there.
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "ops/autocast.h"
#include "ops/autograd_node.h"
#include "ops/composition.h"
#include "ops/convolution/faults.h"

namespace nhwc {
namespace {

/// Returns PyTorch's own answer whether oneDNN takes a dtype: `use_mkldnn_matmul` asks the same. A build without oneDNN
/// has no such operator.
bool is_taken(const char* by_operator) {
  const c10::DispatchKeySet modes{c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot};
  const c10::impl::ExcludeDispatchKeyGuard none(modes);
  const auto op = c10::Dispatcher::singleton().findSchema({by_operator, ""});
  return !op || op->typed<bool()>().call();
}

/// Returns whether products of a dtype are by way of float32, where they are large. Nothing was measured on other CPUs
/// than those of x86.
bool computes_in_float32(at::ScalarType dtype) {
  if (onednn_isa() == OnednnIsa::unknown || (dtype != at::kBFloat16 && dtype != at::kHalf)) return false;
  static const bool takes_bfloat16 = is_taken("mkldnn::_is_mkldnn_bf16_supported");
  static const bool takes_half = is_taken("mkldnn::_is_mkldnn_fp16_supported");
  return !(at::globalContext().userEnabledMkldnn() && (dtype == at::kHalf ? takes_half : takes_bfloat16));
}

/// For each pass, whether it is faster by way of float32.
struct Passes {
  bool forward = false, input_gradient = false, weight_gradient = false;

  bool any() const { return forward || input_gradient || weight_gradient; }
};

/// Returns the passes that gain. Few rows meet a weight in PyTorch's products of a matrix and a vector, which are
/// faster than a cast of the weight; a small product takes less time than the calls of casts. Where sizes are symbols,
/// they are taken to be large.
Passes gaining(const c10::SymInt& rows, const c10::SymInt& inputs, const c10::SymInt& outputs) {
  const c10::SymInt all = rows * inputs * outputs;
  const std::optional<int64_t> products = all.maybe_as_int(), height = rows.maybe_as_int();
  if (!products || !height) return {true, true, true};
  return {*products >= 1 << 15 && *height >= 8, *products >= 1 << 14, *products >= 1 << 17 && *height >= 16};
}

at::Tensor rows_of(const at::Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : tensor.reshape_symint({-1, tensor.sym_size(-1)});
}

/// Returns rows as a new tensor of the leading sizes of another, which is no view for autograd, as PyTorch's is not.
at::Tensor shaped_like(const at::Tensor& rows, const at::Tensor& leading) {
  if (leading.dim() == 2) return rows;
  at::SymDimVector sizes(leading.sym_sizes().begin(), leading.sym_sizes().end());
  sizes.back() = rows.sym_size(1);
  return at::_unsafe_view_symint(rows, sizes);
}

/// Calls a function with the first row and the number of rows of one part after another. The copies in float32 of a
/// part stay in the caches, and no activation has one of its own.
template <typename Function>
void for_each_part(int64_t rows, int64_t inputs, int64_t outputs, const Function& function) {
  constexpr int64_t least_rows = 256, floats = 1 << 18;
  const int64_t step = std::max(least_rows, floats / std::max<int64_t>({inputs, outputs, 1}));
  for (int64_t first = 0; first < rows; first += step) function(first, std::min(step, rows - first));
}

/// `in_parts` where no derivative and no compiler sees what is called.
at::Tensor forward(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias, bool in_float32,
                   bool in_parts) {
  if (!in_float32) return at::linear(input, weight, bias);
  const at::Tensor rows = rows_of(input), wide_weight = weight.to(at::kFloat);
  const OptionalTensor wide_bias = bias ? OptionalTensor(bias->to(at::kFloat)) : bias;
  const auto product = [&](const at::Tensor& part) { return at::linear(part.to(at::kFloat), wide_weight, wide_bias); };
  if (!in_parts) return shaped_like(product(rows).to(input.scalar_type()), input);
  const at::Tensor out = at::empty({rows.size(0), weight.size(0)}, rows.options());
  for_each_part(rows.size(0), weight.size(1), weight.size(0), [&](int64_t first, int64_t count) {
    out.narrow(0, first, count).copy_(product(rows.narrow(0, first, count)));
  });
  return shaped_like(out, input);
}

/// Returns the gradients of input, weight and bias, all of them by way of float32, one part of the rows after another.
std::vector<at::Tensor> gradients_in_parts(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight,
                                           const Formula::Context& context) {
  const int64_t rows = grad.size(0), outputs = grad.size(1);
  const int64_t inputs = weight.defined() ? weight.size(1) : input.size(1);
  const at::TensorOptions wide = grad.options().dtype(at::kFloat);
  std::vector<at::Tensor> found(3);
  at::Tensor wide_weight;
  if (context.needed[0]) {
    found[0] = at::empty({rows, inputs}, grad.options());
    wide_weight = weight.to(at::kFloat);
  }
  if (context.needed[1]) found[1] = at::zeros({outputs, inputs}, wide);
  if (context.needed[2]) found[2] = at::zeros({outputs}, wide);
  for_each_part(rows, inputs, outputs, [&](int64_t first, int64_t count) {
    const at::Tensor part = grad.narrow(0, first, count).to(at::kFloat);
    if (context.needed[0]) found[0].narrow(0, first, count).copy_(part.mm(wide_weight));
    if (context.needed[1]) found[1].addmm_(part.t(), input.narrow(0, first, count).to(at::kFloat));
    if (context.needed[2]) found[2].add_(part.sum(0));
  });
  for (at::Tensor& each : found) {
    if (each.defined()) each = each.to(grad.scalar_type());
  }
  return found;
}

const Formula linear_formula = {
    "NhwcLinearBackward",
    [](const std::vector<at::Tensor>& gradients, const Formula::Context& context) -> std::vector<at::Tensor> {
      const at::Tensor &grad = gradients[0], &input = context.saved[0], &weight = context.saved[1];
      std::vector<at::Tensor> found(3);
      if (!grad.defined()) return found;
      const at::Tensor rows = rows_of(grad);
      const c10::SymInt inputs = weight.defined() ? weight.sym_size(1) : input.sym_size(-1);
      const Passes in_float32 = gaining(rows.sym_size(0), inputs, rows.sym_size(1));
      const bool in_parts = !at::GradMode::is_enabled() && is_unobserved({grad, input, weight});
      if (in_parts && in_float32.input_gradient && in_float32.weight_gradient) {
        found = gradients_in_parts(rows, input.defined() ? rows_of(input) : input, weight, context);
        if (found[0].defined()) found[0] = shaped_like(found[0], grad);
        return found;
      }
      const bool has_wide = in_float32.input_gradient || in_float32.weight_gradient;
      const at::Tensor wide_rows = has_wide ? rows.to(at::kFloat) : rows;  // once, for both products
      const auto product = [&](bool is_wide, const at::Tensor& left, const at::Tensor& right) {
        return is_wide ? left.mm(right.to(at::kFloat)).to(grad.scalar_type()) : left.mm(right);
      };
      if (context.needed[0]) {
        const at::Tensor& left = in_float32.input_gradient ? wide_rows : rows;
        found[0] = shaped_like(product(in_float32.input_gradient, left, weight), grad);
      }
      if (context.needed[1]) {
        const at::Tensor& left = in_float32.weight_gradient ? wide_rows : rows;
        found[1] = product(in_float32.weight_gradient, left.t(), rows_of(input));
      }
      if (context.needed[2]) found[2] = wide_rows.sum(0).to(grad.scalar_type());
      return found;
    }};

/// Returns whether these are a linear layer's tensors of one dtype that is computed in float32. PyTorch's operator has
/// the exceptions for others.
bool is_slow(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias) {
  const at::ScalarType dtype = input.scalar_type();
  if (!computes_in_float32(dtype)) return false;
  const auto fits = [&](const at::Tensor& each) {
    return each.is_cpu() && each.layout() == at::kStrided && !each.is_nested() && each.scalar_type() == dtype;
  };
  if (!fits(input) || !fits(weight) || input.dim() < 1 || weight.dim() != 2) return false;
  if (input.sym_size(-1) != weight.sym_size(1)) return false;
  return !bias || (fits(*bias) && bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0));
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const OptionalTensor& bias) {
  if (!is_slow(input, weight, bias)) return at::linear(input, weight, bias);
  c10::SymInt rows = 1;
  for (int64_t dim = 0; dim < input.dim() - 1; ++dim) rows *= input.sym_size(dim);
  const Passes in_float32 = gaining(rows, weight.sym_size(1), weight.sym_size(0));
  const std::array<at::Tensor, 3> inputs = {input, weight, bias.value_or(at::Tensor())};
  if (!in_float32.any() || !is_unobserved(inputs)) {
    return forward(input, weight, bias, in_float32.forward, /*in_parts=*/false);
  }
  at::Tensor out;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    out = forward(input, weight, bias, in_float32.forward, /*in_parts=*/true);
  }
  if (needs_gradient(inputs)) {
    const at::Tensor none;  // what only a gradient that is not needed would read is not saved
    record(linear_formula, out, inputs, {weight.requires_grad() ? input : none, input.requires_grad() ? weight : none},
           {});
  }
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) {
  m.impl("linear", TORCH_FN(linear));
  m.impl("computes_in_float32", TORCH_FN(computes_in_float32));
}
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) { m.impl("linear", TORCH_FN(linear)); }
TORCH_LIBRARY_IMPL(nhwc, AutocastCPU, m) { m.impl("linear", TORCH_FN(Lowered<linear>::call)); }

}  // namespace nhwc
