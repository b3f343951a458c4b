// AVX-512 F, BW, DQ and VL, which every CPU with AVX-512 has, except for the first accelerators.
#include "cpu/isa/isa_prologue.h"

#if defined(__x86_64__)
#define NHWC_X86_LEVEL 3
NHWC_TARGET("avx2,fma,bmi2,f16c,avx512f,avx512bw,avx512dq,avx512vl")

#include "cpu/isa/make_filter_kernels.h"
#include "cpu/isa/make_kernels.h"

namespace nhwc::cpu::isa {

constexpr Kernels avx512 = make_kernels();
constexpr FilterKernels filter_avx512 = make_filter_kernels();

}  // namespace nhwc::cpu::isa

NHWC_TARGET_END
#endif
