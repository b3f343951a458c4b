#include "cpu/pointwise.h"

#include <ATen/ATen.h>

#include "cpu/dispatch.h"
#include "cpu/work/ranges.h"

namespace nhwc::cpu {
namespace {

const char* pixel_of(const at::Tensor& activation, int64_t pixel) {
  return static_cast<const char*>(activation.const_data_ptr()) + pixel * activation.size(1) * activation.element_size();
}

}  // namespace

void pointwise(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& out,
               const Output& output) {
  if (out.numel() == 0) return;
  const int64_t inputs = input.size(1), outputs = out.size(1);
  const PointwiseKernels& kernels = of_type(level_kernels().pointwise, input.scalar_type());
  const bool has_few_inputs = inputs <= most_few;
  const auto multiply = has_few_inputs ? kernels.spread[inputs - 1] : kernels.reduce[outputs - 1];
  const at::Tensor weights = (has_few_inputs ? weight.t() : weight).to(at::kFloat).contiguous();
  const at::Tensor biases = bias.defined() ? bias.to(at::kFloat).contiguous() : at::zeros({outputs}, weights.options());
  const bool finishes = !output.is_empty();
  constexpr int64_t most_pixels = 4096;
  const Parts ranges(out.numel() / outputs,
                     finishes ? std::min(most_pixels, divide_up(most_finished, outputs)) : most_pixels);
  for_each_task(ranges.parts, ranges.size * (inputs + outputs) * products_of_element, 0, [&](int64_t range, char*) {
    const int64_t pixels = ranges.size_of(range);
    const char* first = pixel_of(out, ranges.begin(range));
    multiply(pixel_of(input, ranges.begin(range)), pixels, has_few_inputs ? outputs : inputs,
             weights.const_data_ptr<float>(), biases.const_data_ptr<float>(), const_cast<char*>(first));
    if (finishes) output.finish(out, first, pixels * outputs);
  });
}

}  // namespace nhwc::cpu
