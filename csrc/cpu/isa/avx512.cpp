// AVX-512 F, BW, DQ and VL, which every CPU with AVX-512 has, except for the first accelerators.
#include "cpu/isa/isa_prologue.h"

#if defined(__x86_64__)
#define NHWC_X86_LEVEL 3
NHWC_TARGET("avx2,fma,bmi2,f16c,avx512f,avx512bw,avx512dq,avx512vl")

#include "cpu/isa/make_depthwise_kernels.h"
#include "cpu/isa/make_filter_kernels.h"
#include "cpu/isa/make_norm_kernels.h"
#include "cpu/isa/make_pointwise_kernels.h"
#include "cpu/isa/make_softmax_kernels.h"
#include "cpu/isa/make_weight_gradient_kernels.h"

namespace nhwc::cpu::isa {

constexpr DepthwiseKernelsByType depthwise_avx512 = make_all_depthwise_kernels();
constexpr FilterKernels avx512 = make_filter_kernels();
constexpr NormKernelsByType norm_avx512 = make_all_norm_kernels();
constexpr WeightGradientKernelsByType weight_gradient_avx512 = make_all_weight_gradient_kernels();
constexpr PointwiseKernelsByType pointwise_avx512 = make_all_pointwise_kernels();
constexpr SoftmaxKernels softmax_avx512 = make_softmax_kernels();

}  // namespace nhwc::cpu::isa

NHWC_TARGET_END
#endif
