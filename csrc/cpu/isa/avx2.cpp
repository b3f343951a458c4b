// AVX2 and the extensions that every CPU with AVX2 has.
#include "cpu/isa/isa_prologue.h"

#if defined(__x86_64__)
#define NHWC_X86_LEVEL 2
NHWC_TARGET("avx2,fma,bmi2,f16c")

#include "cpu/isa/make_filter_kernels.h"
#include "cpu/isa/make_kernels.h"

namespace nhwc::cpu::isa {

constexpr Kernels avx2 = make_kernels();
constexpr FilterKernels filter_avx2 = make_filter_kernels();
constexpr FilterKernels filter_avx2_128 = make_filter_kernels<16>();

}  // namespace nhwc::cpu::isa

NHWC_TARGET_END
#endif
