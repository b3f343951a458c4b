// AVX2 and the extensions that every CPU with AVX2 has.
#include "cpu/isa/isa_prologue.h"

#if defined(__x86_64__)
#define NHWC_X86_LEVEL 2
NHWC_TARGET("avx2,fma,bmi2,f16c")

#include "cpu/isa/make_depthwise_kernels.h"
#include "cpu/isa/make_filter_kernels.h"
#include "cpu/isa/make_grouped_kernels.h"
#include "cpu/isa/make_norm_kernels.h"
#include "cpu/isa/make_pointwise_kernels.h"
#include "cpu/isa/make_softmax_kernels.h"
#include "cpu/isa/make_weight_gradient_kernels.h"

namespace nhwc::cpu::isa {

constexpr DepthwiseKernelsByType depthwise_avx2 = make_all_depthwise_kernels();
constexpr FilterKernels avx2 = make_filter_kernels();
constexpr FilterKernels avx2_128 = make_filter_kernels<16>();
constexpr NormKernelsByType norm_avx2 = make_all_norm_kernels();
constexpr WeightGradientKernelsByType weight_gradient_avx2 = make_all_weight_gradient_kernels();
constexpr GroupedKernelsByType grouped_avx2 = make_all_grouped_kernels();
constexpr PointwiseKernelsByType pointwise_avx2 = make_all_pointwise_kernels();
constexpr SoftmaxKernels softmax_avx2 = make_softmax_kernels();

}  // namespace nhwc::cpu::isa

NHWC_TARGET_END
#endif
