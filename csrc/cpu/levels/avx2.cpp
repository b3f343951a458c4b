// AVX2, with the extensions that came before or with it.
#include "cpu/levels/before_level.h"

#if defined(__x86_64__)
#define NHWC_X86_LEVEL 2
NHWC_TARGET("avx2,fma,bmi2,f16c")

#include "cpu/levels/make_filter_kernels.h"
#include "cpu/levels/make_norm_kernels.h"
#include "cpu/levels/make_softmax_kernels.h"

namespace nhwc::cpu::levels {

constexpr FilterKernels avx2 = make_filter_kernels();
constexpr NormKernelsByType norm_avx2 = make_all_norm_kernels();
constexpr SoftmaxKernels softmax_avx2 = softmax::make_kernels();

}  // namespace nhwc::cpu::levels

NHWC_TARGET_END
#endif
