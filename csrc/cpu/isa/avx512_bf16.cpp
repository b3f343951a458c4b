// The cast to bfloat16 by AVX512_BF16, in addition to AVX-512 with VBMI.
#include "cpu/isa/isa_prologue.h"

#if defined(__x86_64__)
#define NHWC_X86_LEVEL 5
NHWC_TARGET("avx2,fma,bmi2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16")

#include "cpu/isa/make_filter_kernels.h"

namespace nhwc::cpu::isa {

constexpr FilterKernels::Transpose float_to_bfloat16 =
    transpose_and_cast<float, std::uint16_t, FloatToBFloat16, NHWC_REGISTER_BYTES>;
constexpr FilterKernels::Transpose float_to_bfloat16_half_width =
    transpose_and_cast<float, std::uint16_t, FloatToBFloat16, 32>;

}  // namespace nhwc::cpu::isa

NHWC_TARGET_END
#endif
