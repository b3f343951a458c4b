// The passes of a convolution: the result and the gradients, each computed by the fastest that is right. That is
// PyTorch, PyTorch in float32, matrix products, or our kernels.
#pragma once

#include <array>
#include <vector>

#include "cpu/output.h"
#include "ops/convolution/choice.h"

namespace nhwc {

/// Returns the convolution, by its way.
at::Tensor convolution(const Call& call);

/// Returns a convolution of one tap as a product of matrices, and what follows it, of floats. On one thread that is
/// computed for some rows at a time, while they are in a cache.
at::Tensor by_products(const Call& call, const cpu::Output& output);

/// Computes a convolution with all passes by our kernels.
at::Tensor by_all_kernels(const Call& call);

/// Returns gradients of the input, the weight and the bias that can be differentiated, without our kernels. Where
/// PyTorch's own may be wrong, they are those of the composition that takes its place.
std::vector<at::Tensor> composed_gradients(const Call& call, const at::Tensor& grad, std::array<bool, 3> needed);

}  // namespace nhwc

/// The passes by our kernels. Results are channels-last, in canonical strides. Of meta tensors, whose sizes may be
/// symbolic, the results are only allocated.
namespace nhwc::kernels {

/// Returns the sizes of the result.
at::SymDimVector output_sizes(const Call& call);

/// Returns the result of a depthwise convolution or of one of few pixels, and what follows it, of floats.
at::Tensor forward(const Call& call, const cpu::Output& output = {});

/// Returns the needed gradients of the input, of the weight, in its layout, and of the bias; the others are undefined.
/// That of the input is for what `forward` takes.
std::array<at::Tensor, 3> gradients(const Call& call, const at::Tensor& grad, std::array<bool, 3> needed);

}  // namespace nhwc::kernels
