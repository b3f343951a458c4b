// Chooses the instruction set, once, at the first use.
#pragma once

#include <string>

#include "cpu/depthwise_kernels.h"
#include "cpu/filter_kernels.h"
#include "cpu/grouped_kernels.h"
#include "cpu/norm_kernels.h"
#include "cpu/weight_gradient_kernels.h"

namespace nhwc::cpu {

/// Returns the kernels of the best instruction set of this CPU. TORCH_NHWC_CPU_CAPABILITY chooses another: baseline,
/// avx2, avx512, avx512_vbmi or neon. Without it, PyTorch's ATEN_CPU_CAPABILITY (default, avx2, avx512) is an upper
/// bound.
///
/// Raises where TORCH_NHWC_CPU_CAPABILITY names an instruction set that this CPU does not have.
const FilterKernels& filter_kernels();

/// Returns the passes of group norm, for the same instruction set.
const NormKernelsByType& norm_kernels();

/// Returns depthwise convolutions, for the same instruction set.
const DepthwiseKernelsByType& depthwise_kernels();

/// Returns the inner loops of a convolution's weight gradient, for the same instruction set.
const WeightGradientKernelsByType& weight_gradient_kernels();

/// Returns grouped convolutions, for the same instruction set.
const GroupedKernelsByType& grouped_kernels();

/// Returns the name of the chosen instruction set.
std::string capability();

}  // namespace nhwc::cpu
