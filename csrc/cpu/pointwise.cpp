#include "cpu/pointwise.h"

#include <ATen/ATen.h>

#include "cpu/dispatch.h"
#include "cpu/work/ranges.h"

namespace nhwc::cpu {
namespace {

/// Ranges of pixels whose products are summed apart: few pixels, for the sake of accuracy.
Parts ranges_of(const at::Tensor& activation) {
  constexpr int64_t most_pixels = 4096;
  return {activation.numel() / activation.size(1), most_pixels};
}

const char* pixel_of(const at::Tensor& activation, int64_t pixel) {
  return static_cast<const char*>(activation.const_data_ptr()) + pixel * activation.size(1) * activation.element_size();
}

}  // namespace

void pointwise(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& out) {
  if (out.numel() == 0) return;
  const int64_t inputs = input.size(1), outputs = out.size(1);
  const PointwiseKernels& kernels = of_type(level_kernels().pointwise, input.scalar_type());
  const bool has_few_inputs = inputs <= most_few;
  const auto multiply = has_few_inputs ? kernels.spread[inputs - 1] : kernels.reduce[outputs - 1];
  const at::Tensor weights = (has_few_inputs ? weight.t() : weight).to(at::kFloat).contiguous();
  const at::Tensor biases = bias.defined() ? bias.to(at::kFloat).contiguous() : at::zeros({outputs}, weights.options());
  const Parts ranges = ranges_of(out);
  for_each_task(ranges.parts, ranges.size * (inputs + outputs) * products_of_element, 0, [&](int64_t range, char*) {
    multiply(pixel_of(input, ranges.begin(range)), ranges.size_of(range), has_few_inputs ? outputs : inputs,
             weights.const_data_ptr<float>(), biases.const_data_ptr<float>(),
             const_cast<char*>(pixel_of(out, ranges.begin(range))));
  });
}

void pointwise_weight_gradient(const ConvolutionSizes&, const at::Tensor& grad, const at::Tensor& input,
                               const at::Tensor& grad_weight, const at::Tensor& grad_bias) {
  const bool has_few_outputs = grad.size(1) <= most_few;
  const at::Tensor &few = has_few_outputs ? grad : input, &many = has_few_outputs ? input : grad;
  const int64_t rows = few.size(1), columns = many.size(1) + 1, size = rows * columns;
  const Parts ranges = ranges_of(grad);
  const at::Tensor sums = at::zeros({std::max<int64_t>(1, ranges.parts), rows, columns}, at::kFloat);
  auto* all = sums.mutable_data_ptr<float>();
  const auto accumulate = of_type(level_kernels().pointwise, grad.scalar_type()).accumulate[rows - 1];
  for_each_task(ranges.parts, ranges.size * (rows + columns) * products_of_element, 0, [&](int64_t range, char*) {
    const int64_t first = ranges.begin(range);
    accumulate(pixel_of(few, first), pixel_of(many, first), ranges.size_of(range), columns - 1, all + range * size);
  });
  add_up_parts<float>(all, ranges.parts, size);
  const at::Tensor products = sums[0].narrow(1, 0, columns - 1);
  grad_weight.copy_((has_few_outputs ? products : products.t()).reshape(grad_weight.sizes()));
  if (!grad_bias.defined()) return;
  grad_bias.copy_(has_few_outputs ? sums[0].select(1, columns - 1) : grad.movedim(1, -1).flatten(0, -2).sum(0));
}

}  // namespace nhwc::cpu
