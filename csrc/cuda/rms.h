// RMS norm over the channels of channels-last activations on a CUDA device. A library that is built without CUDA has no
// kernels for it: no_cuda/rms.cpp.
#pragma once

#include <ATen/core/Tensor.h>

namespace nhwc::cuda {

/// RMS norm over the channels of dense channels-last activations, whose rows are `[rows, channels]`, and what follows
/// it. All tensors are on one device; parameters are dense, of the input's dtype, and the bias may be undefined.
struct ChannelRms {
  const at::Tensor &input, &weight, &bias;
  double scale, eps;
  bool has_silu;
};

/// Returns whether the kernels run on the input's device, and take its dtype and size.
bool can_run(const ChannelRms& rms);

/// Writes the output on the current stream.
void channel_rms_norm(const ChannelRms& rms, const at::Tensor& out);

/// Writes the gradients that are defined.
void channel_rms_norm_backward(const ChannelRms& rms, const at::Tensor& grad, const at::Tensor& grad_input,
                               const at::Tensor& grad_weight, const at::Tensor& grad_bias);

}  // namespace nhwc::cuda
