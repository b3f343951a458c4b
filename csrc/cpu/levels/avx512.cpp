// AVX-512 as every CPU that has it outside of the first accelerators: F, BW, DQ and VL.
#include "cpu/levels/before_level.h"

#if defined(__x86_64__)
#define NHWC_X86_LEVEL 3
NHWC_TARGET("avx2,fma,bmi2,f16c,avx512f,avx512bw,avx512dq,avx512vl")

#include "cpu/levels/make_filter_kernels.h"
#include "cpu/levels/make_norm_kernels.h"
#include "cpu/levels/make_softmax_kernels.h"

namespace nhwc::cpu::levels {

constexpr FilterKernels avx512 = make_filter_kernels();
constexpr NormKernelsByType norm_avx512 = make_all_norm_kernels();
constexpr SoftmaxKernels softmax_avx512 = softmax::make_kernels();

}  // namespace nhwc::cpu::levels

NHWC_TARGET_END
#endif
