// The instruction set of everything else: SSE2 on x86-64, NEON on 64-bit Arm.
#include "cpu/levels/before_level.h"
#include "cpu/levels/make_filter_kernels.h"
#include "cpu/levels/make_norm_kernels.h"
#include "cpu/levels/make_softmax_kernels.h"

namespace nhwc::cpu::levels {

#if defined(__ARM_NEON)
constexpr FilterKernels neon = make_filter_kernels();
constexpr NormKernelsByType norm_neon = make_all_norm_kernels();
constexpr SoftmaxKernels softmax_neon = softmax::make_kernels();
#else
constexpr FilterKernels baseline = make_filter_kernels();
constexpr NormKernelsByType norm_baseline = make_all_norm_kernels();
constexpr SoftmaxKernels softmax_baseline = softmax::make_kernels();
#endif

}  // namespace nhwc::cpu::levels
