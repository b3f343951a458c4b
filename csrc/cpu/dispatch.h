// The choice of the instruction set, made once, at the first use.
#pragma once

#include <string>

#include "cpu/filter_kernels.h"
#include "cpu/norm_kernels.h"
#include "cpu/softmax_kernels.h"

namespace nhwc::cpu {

/// The kernels of the best level that this CPU has. TORCH_NHWC_CPU_CAPABILITY names another: baseline, avx2, avx512,
/// avx512_vbmi or neon. Without it, PyTorch's ATEN_CPU_CAPABILITY (default, avx2, avx512) is an upper bound.
///
/// Raises where TORCH_NHWC_CPU_CAPABILITY names a level that this CPU does not have.
const FilterKernels& filter_kernels();

/// The passes of group norm, of the same level.
const NormKernelsByType& norm_kernels();
/// Those of softmax, of the same level.
const SoftmaxKernels& softmax_kernels();

/// The name of the level that `filter_kernels` has chosen.
std::string capability();

}  // namespace nhwc::cpu
