// Convolutions of three taps along an axis, or of one, with fewer multiplications: Winograd's minimal filtering, by our
// own kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/output.h"
#include "cpu/winograd_kernels.h"
#include "cpu/work/axes.h"

namespace nhwc::cpu {

/// All tensors are dense and channels-last, of one dtype: float, bfloat16 or half. Of each axis, stride and dilation
/// are 1, there are three taps under a tile of several results, and at most 2 of padding, or one tap without padding.
/// One group follows the other. Sums are floats, and do not depend on the number of threads. The bias may be undefined.
/// The output is for floats.
///
/// Memory beside the results: the transformed weight, and at most 8 MB a thread; for the gradient of a weight by
/// several threads, which add up to 16 ranges of the tiles, at most 40 MB of all threads together.
void winograd_forward(const ConvolutionSizes& sizes, const WinogradTile& tile, const at::Tensor& input,
                      const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& out,
                      const Output& output = {});

/// Writes the gradient of the input, and adds the bias to it if that is defined.
void winograd_input_gradient(const ConvolutionSizes& sizes, const WinogradTile& tile, const at::Tensor& grad,
                             const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& grad_input);

/// Writes the gradients of the weight and, if `grad_bias` is defined, of the bias.
void winograd_weight_gradient(const ConvolutionSizes& sizes, const WinogradTile& tile, const at::Tensor& grad,
                              const at::Tensor& input, const at::Tensor& grad_weight, const at::Tensor& grad_bias);

}  // namespace nhwc::cpu
