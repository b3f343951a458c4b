// RMS norm over the channels of channels-last activations, by our own kernels.
#pragma once

#include <ATen/core/Tensor.h>

namespace nhwc::cpu {

/// activation(x * scale / max(length of x, eps) * weight + bias), where x is the channels of a pixel or voxel. The
/// input is dense and in channels-last. The parameters are dense and of its dtype; the bias may be undefined.
struct ChannelRms {
  const at::Tensor &input, &weight, &bias;
  double scale, eps;
  bool has_silu;
  at::Tensor input_bias = {};  ///< as the bias, added to the input; on a GPU, forward
};

/// Returns whether there are kernels for it: not for doubles with an activation.
bool can_run(const ChannelRms& rms);

void channel_rms_norm(const ChannelRms& rms, const at::Tensor& out);

/// Writes the gradients that are defined, of an output's that is as the input. Those of parameters are of its dtype.
void channel_rms_norm_backward(const ChannelRms& rms, const at::Tensor& grad, const at::Tensor& grad_input,
                               const at::Tensor& grad_weight, const at::Tensor& grad_bias);

}  // namespace nhwc::cpu
