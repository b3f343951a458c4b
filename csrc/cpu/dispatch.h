// Chooses the instruction set, once, at the first use.
#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <string>

#include "cpu/filter_kernels.h"
#include "cpu/kernels.h"

namespace nhwc::cpu {

/// Returns the kernels of the best instruction set of this CPU. TORCH_NHWC_CPU_CAPABILITY chooses another: baseline,
/// avx2, avx2_128, avx512, avx512_vbmi or neon. Without it, PyTorch's ATEN_CPU_CAPABILITY (default, avx2, avx512) is an
/// upper bound.
///
/// Raises where TORCH_NHWC_CPU_CAPABILITY names an instruction set that this CPU does not have.
const Kernels& level_kernels();

/// Returns filter transposes, for the same instruction set.
const FilterKernels& filter_kernels();

/// Returns the kernels of a family for a dtype.
template <typename Family>
const Family& of_type(const ByType<Family>& family, c10::ScalarType type) {
  switch (type) {
    case c10::kDouble: return family.of_double;
    case c10::kFloat: return family.of_float;
    case c10::kHalf: return family.of_half;
    default: TORCH_INTERNAL_ASSERT(type == c10::kBFloat16, "a kernel for ", type); return family.of_bfloat16;
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
