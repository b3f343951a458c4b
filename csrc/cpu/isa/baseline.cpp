// The instruction set of all other files: SSE2 on x86-64, NEON on 64-bit Arm.
#include "cpu/isa/isa_prologue.h"
#include "cpu/isa/make_filter_kernels.h"
#include "cpu/isa/make_kernels.h"

namespace nhwc::cpu::isa {

#if defined(__ARM_NEON)
constexpr Kernels neon = make_kernels();
constexpr FilterKernels filter_neon = make_filter_kernels();
#else
constexpr Kernels baseline = make_kernels();
constexpr FilterKernels filter_baseline = make_filter_kernels();
#endif

}  // namespace nhwc::cpu::isa
