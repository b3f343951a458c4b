// Chooses the instruction set, once, at the first use.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <string>

#include "cpu/depthwise_kernels.h"
#include "cpu/filter_kernels.h"
#include "cpu/norm_kernels.h"
#include "cpu/pointwise_kernels.h"
#include "cpu/softmax_kernels.h"
#include "cpu/weight_gradient_kernels.h"

namespace nhwc::cpu {

/// Returns the kernels of the best instruction set of this CPU. TORCH_NHWC_CPU_CAPABILITY chooses another: baseline,
/// avx2, avx2_128, avx512, avx512_vbmi or neon. Without it, PyTorch's ATEN_CPU_CAPABILITY (default, avx2, avx512) is an
/// upper bound.
///
/// Raises where TORCH_NHWC_CPU_CAPABILITY names an instruction set that this CPU does not have.
const FilterKernels& filter_kernels();

/// Returns the passes of group norm, for the same instruction set.
const NormKernelsByType& norm_kernels();

/// Returns depthwise convolutions, for the same instruction set.
const DepthwiseKernelsByType& depthwise_kernels();

/// Returns the inner loops of a convolution's weight gradient, for the same instruction set.
const WeightGradientKernelsByType& weight_gradient_kernels();

/// Returns products of pixels of few channels, for the same instruction set.
const PointwiseKernelsByType& pointwise_kernels();

/// Returns softmax and log-softmax of pixels, for the same instruction set.
const SoftmaxKernels& softmax_kernels();

/// Returns the kernels of a dtype. Not all have doubles.
template <typename KernelsByType>
const auto& of_type(const KernelsByType& kernels, c10::ScalarType type) {
  if constexpr (requires { kernels.of_double; }) {
    if (type == c10::kDouble) return kernels.of_double;
  }
  switch (type) {
    case c10::kFloat: return kernels.of_float;
    case c10::kHalf: return kernels.of_half;
    default: TORCH_INTERNAL_ASSERT(type == c10::kBFloat16, "a kernel for ", type); return kernels.of_bfloat16;
  }
}

/// Transposes with a cast between elements and the numbers that kernels compute with: floats or, for doubles, doubles.
struct NumberTransposes {
  FilterKernels::Transpose to_numbers, from_numbers;
};

/// Returns those of a dtype, for the same instruction set.
NumberTransposes number_transposes(c10::ScalarType type);

/// Returns the name of the chosen instruction set.
std::string capability();

}  // namespace nhwc::cpu
