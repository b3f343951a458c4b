// Depthwise 3D convolution of channels-last activations on a CUDA device. A library that is built without CUDA has no
// kernels for it: no_cuda/depthwise.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>

namespace nhwc::cuda {

/// A convolution whose groups, inputs and outputs are as many. All tensors are on one device and have one dtype.
struct Depthwise {
  at::Tensor weight;  ///< contiguous
  std::array<int64_t, 3> stride, padding, dilation;
};

/// Returns whether the kernels run on the device of an input, and compute its convolution. Its gradient they compute
/// with strides of 1.
bool can_run(const Depthwise& convolution, const at::Tensor& input);

/// Each takes and writes dense channels-last activations, on the current stream. The bias may be undefined.
void depthwise_forward(const Depthwise& convolution, const at::Tensor& input, const at::Tensor& bias,
                       const at::Tensor& out);
void depthwise_input_gradient(const Depthwise& convolution, const at::Tensor& grad, const at::Tensor& grad_input);
void depthwise_weight_gradient(const Depthwise& convolution, const at::Tensor& grad, const at::Tensor& input,
                               const at::Tensor& grad_weight);

}  // namespace nhwc::cuda
