// The filter transpose, compiled for one instruction set. Uses neither torch nor code of the standard library: a file
// that is compiled for a newer instruction set than the rest must not define functions that other files share.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

struct FilterKernels {
  /// `nhwc::filter_transpose` for one element type, or pair of them.
  using Transpose = void (*)(const void* source, void* destination, std::int64_t filters, std::int64_t rows,
                             std::int64_t columns, bool non_temporal);
  /// `nhwc::filter_transpose_in_place`.
  using TransposeInPlace = void (*)(void* data, void* scratch, std::int64_t filters, std::int64_t rows,
                                    std::int64_t columns);

  Transpose transpose[5];  ///< for elements of 1, 2, 4, 8 and 16 bytes
  TransposeInPlace transpose_in_place[5];
  Transpose float_to_bfloat16, float_to_half, bfloat16_to_float, half_to_float;
};

namespace isa {

extern const FilterKernels baseline;
extern const FilterKernels avx2;
extern const FilterKernels avx2_128;  ///< registers of 16 bytes, for AMD's CPUs without AVX-512
extern const FilterKernels avx512;
extern const FilterKernels avx512_vbmi;
extern const FilterKernels avx512_vbmi_half_width;  ///< registers of 32 bytes, for CPUs that split those of 64
extern const FilterKernels neon;

/// The cast by the instruction of AVX512_BF16, with registers of 64 and of 32 bytes.
extern const FilterKernels::Transpose float_to_bfloat16;
extern const FilterKernels::Transpose float_to_bfloat16_half_width;

}  // namespace isa
}  // namespace nhwc::cpu
