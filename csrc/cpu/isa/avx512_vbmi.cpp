// AVX-512 with VBMI, which shuffles bytes.
#include "cpu/isa/isa_prologue.h"

#if defined(__x86_64__)
#define NHWC_X86_LEVEL 4
NHWC_TARGET("avx2,fma,bmi2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")

#include "cpu/isa/make_filter_kernels.h"

namespace nhwc::cpu::isa {

constexpr FilterKernels filter_avx512_vbmi = make_filter_kernels();
constexpr FilterKernels filter_avx512_vbmi_half_width = make_filter_kernels<32>();

}  // namespace nhwc::cpu::isa

NHWC_TARGET_END
#endif
