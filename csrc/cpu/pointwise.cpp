#include "cpu/pointwise.h"

#include <ATen/ATen.h>

#include <numeric>

#include "cpu/dispatch.h"
#include "cpu/work/pixels.h"

namespace nhwc::cpu {

void pointwise(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& out) {
  if (out.numel() == 0) return;
  const int64_t inputs = input.size(1), outputs = out.size(1), channels = std::max(inputs, outputs);
  const at::Tensor weights = weight.to(at::kFloat).contiguous();
  const at::Tensor biases = bias.defined() ? bias.to(at::kFloat).contiguous() : at::zeros({outputs}, weights.options());
  const Parts tiles = tiles_of(out.numel() / outputs, channels);
  const Pixels from(input, tiles), to(out, tiles);
  const auto multiply = level_kernels().pointwise.multiply;
  const int64_t numbers = from.numbers_with_room() + to.numbers_with_room();
  for_each_tile(tiles, channels, numbers, [&](int64_t tile, float* planes) {
    float* out_planes = planes + from.numbers();
    from.read(tile, planes);
    multiply(planes, from.plane(tile), inputs, outputs, weights.const_data_ptr<float>(), biases.const_data_ptr<float>(),
             out_planes);
    to.write(out_planes, tile);
  });
}

void pointwise_weight_gradient(const ConvolutionSizes&, const at::Tensor& grad, const at::Tensor& input,
                               const at::Tensor& grad_weight, const at::Tensor& grad_bias) {
  if (grad.numel() == 0) {
    grad_weight.zero_();
    if (grad_bias.defined()) grad_bias.zero_();
    return;
  }
  constexpr int64_t pixels_of_range = 4096;  // which are summed apart: few, for the sake of accuracy
  const int64_t inputs = input.size(1), outputs = grad.size(1), channels = std::max(inputs, outputs);
  const Parts tiles = tiles_of(grad.numel() / outputs, channels), ranges(tiles.parts, pixels_of_range / tiles.size);
  const Pixels from_grad(grad, tiles), from(input, tiles);
  const PointwiseKernels& kernels = level_kernels().pointwise;
  const int64_t size = outputs * (inputs + 1), lanes = kernels.lanes;
  const at::Tensor sums = at::empty({ranges.parts, outputs, inputs + 1}, at::kFloat);
  auto* all_sums = sums.mutable_data_ptr<float>();
  const int64_t numbers = size * lanes + from_grad.numbers() + from.numbers() + 2 * tiles.size * channels;
  for_each_tile(ranges, tiles.size * channels, numbers, [&](int64_t range, float* added) {
    float *grads = added + size * lanes, *inputs_of_tile = grads + from_grad.numbers();
    std::fill_n(added, size * lanes, 0.0f);
    for (int64_t tile = ranges[range].begin; tile < ranges[range].end; ++tile) {
      from_grad.read(tile, grads);
      from.read(tile, inputs_of_tile);
      kernels.accumulate(grads, inputs_of_tile, from.plane(tile), inputs, outputs, added);
    }
    for (int64_t k = 0; k < size; ++k) {
      all_sums[range * size + k] = std::accumulate(added + k * lanes, added + (k + 1) * lanes, 0.0f);
    }
  });
  add_up_parts<float>(all_sums, ranges.parts, size);
  grad_weight.copy_(sums[0].narrow(1, 0, inputs).reshape(grad_weight.sizes()));
  if (grad_bias.defined()) grad_bias.copy_(sums[0].select(1, inputs));
}

}  // namespace nhwc::cpu
