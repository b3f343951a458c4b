#include "cpu/softmax.h"

#include "cpu/dispatch.h"
#include "cpu/work/pixels.h"

namespace nhwc::cpu {

void softmax(const at::Tensor& input, bool is_log, const at::Tensor& out) {
  if (input.numel() == 0) return;
  const int64_t channels = input.size(1), count = input.numel() / channels;
  const Parts tiles = tiles_of(count, channels);
  const Pixels from(input, tiles), to(out, tiles);
  const SoftmaxKernels& kernels = level_kernels().softmax;
  const auto compute = is_log ? kernels.log_softmax : kernels.softmax;
  for_each_tile(tiles, channels, from.numbers_with_room(), [&](int64_t tile, float* planes) {
    from.read(tile, planes);
    to.prefetch(tile);
    compute(planes, channels, from.plane(tile));
    to.write(planes, tile);
  });
}

void softmax_backward(const at::Tensor& grad, const at::Tensor& output, bool is_log, const at::Tensor& grad_input) {
  if (grad.numel() == 0) return;
  const int64_t channels = grad.size(1), count = grad.numel() / channels;
  const Parts tiles = tiles_of(count, channels);
  const Pixels from(grad, tiles), from_output(output, tiles), to(grad_input, tiles);
  const SoftmaxKernels& kernels = level_kernels().softmax;
  const auto compute = is_log ? kernels.log_softmax_gradient : kernels.softmax_gradient;
  for_each_tile(tiles, channels, from.numbers() + from.numbers_with_room(), [&](int64_t tile, float* outputs) {
    float* grads = outputs + from.numbers();
    from_output.read(tile, outputs);
    from.read(tile, grads);
    to.prefetch(tile);
    compute(grads, outputs, channels, from.plane(tile));
    to.write(grads, tile);
  });
}

}  // namespace nhwc::cpu
