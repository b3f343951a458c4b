// RMS norm over the channels of channels-last activations on a CUDA device. A library that is built without CUDA has no
// kernels for it: no_cuda/rms.cpp.
#pragma once

#include "cpu/rms.h"

namespace nhwc::cuda {

using cpu::ChannelRms;

/// Returns whether the kernels run on an activation's device, and take its dtype and sizes.
bool can_run(const ChannelRms& rms);

/// The same as on a CPU, on the current stream.
void channel_rms_norm(const ChannelRms& rms, const at::Tensor& out);
void channel_rms_norm_backward(const ChannelRms& rms, const at::Tensor& grad, const at::Tensor& grad_input,
                               const at::Tensor& grad_weight, const at::Tensor& grad_bias);

}  // namespace nhwc::cuda
