#include "cpu/pointwise.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "cpu/dispatch.h"
#include "cpu/threads.h"

namespace nhwc::cpu {
namespace {

constexpr int64_t pixels_of_range = 4096;  // whose products are summed apart, however many threads there are

int64_t pixels_of(const at::Tensor& activation) {
  return activation.numel() / std::max<int64_t>(1, activation.size(1));
}

const char* pixel_of(const at::Tensor& activation, int64_t pixel) {
  return static_cast<const char*>(activation.const_data_ptr()) + pixel * activation.size(1) * activation.element_size();
}

}  // namespace

void pointwise(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& out) {
  const int64_t inputs = input.size(1), outputs = out.size(1);
  const at::Tensor weights = weight.to(at::kFloat).contiguous();
  const at::Tensor biases = bias.defined() ? bias.to(at::kFloat).contiguous() : at::zeros({outputs}, weights.options());
  const auto multiply = of_type(pointwise_kernels(), input.scalar_type()).multiply;
  at::parallel_for(0, pixels_of(out), elements_worth_a_thread / (inputs + outputs), [&](int64_t begin, int64_t end) {
    multiply(pixel_of(input, begin), end - begin, inputs, outputs, weights.const_data_ptr<float>(),
             biases.const_data_ptr<float>(), const_cast<char*>(pixel_of(out, begin)));
  });
}

void pointwise_weight_gradient(const ConvolutionSizes& sizes, const at::Tensor& grad, const at::Tensor& input,
                               const at::Tensor& grad_weight, const at::Tensor& grad_bias) {
  // The roles of both are the same but for the bias.
  const bool is_swapped = sizes.outputs > most_few;
  const at::Tensor &few = is_swapped ? input : grad, &many = is_swapped ? grad : input;
  const int64_t rows = few.size(1), columns = many.size(1), pixels = pixels_of(grad);
  const int64_t ranges = std::max<int64_t>(1, (pixels + pixels_of_range - 1) / pixels_of_range);
  const auto options = grad.options().dtype(at::kFloat);
  const at::Tensor sums = at::zeros({ranges, rows, columns}, options), few_sums = at::zeros({ranges, rows}, options);
  const auto accumulate = of_type(pointwise_kernels(), grad.scalar_type()).accumulate;
  at::parallel_for(0, ranges, elements_worth_a_thread / pixels_of_range, [&](int64_t begin, int64_t end) {
    for (int64_t range = begin; range < end; ++range) {
      const int64_t first = range * pixels_of_range, count = std::min(pixels_of_range, pixels - first);
      accumulate(pixel_of(few, first), pixel_of(many, first), count, columns, rows,
                 sums.mutable_data_ptr<float>() + range * rows * columns,
                 few_sums.mutable_data_ptr<float>() + range * rows);
    }
  });
  const at::Tensor sum = sums.sum(0);
  grad_weight.copy_((is_swapped ? sum.t() : sum).reshape(grad_weight.sizes()));
  if (!grad_bias.defined()) return;
  grad_bias.copy_(is_swapped ? grad.movedim(1, -1).flatten(0, -2).sum(0) : few_sums.sum(0));
}

}  // namespace nhwc::cpu
