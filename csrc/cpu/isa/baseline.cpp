// The instruction set of all other files: SSE2 on x86-64, NEON on 64-bit Arm.
#include "cpu/isa/isa_prologue.h"
#include "cpu/isa/make_depthwise_kernels.h"
#include "cpu/isa/make_filter_kernels.h"
#include "cpu/isa/make_norm_kernels.h"
#include "cpu/isa/make_pointwise_kernels.h"
#include "cpu/isa/make_softmax_kernels.h"
#include "cpu/isa/make_weight_gradient_kernels.h"

namespace nhwc::cpu::isa {

#if defined(__ARM_NEON)
constexpr DepthwiseKernelsByType depthwise_neon = make_all_depthwise_kernels();
constexpr FilterKernels neon = make_filter_kernels();
constexpr NormKernelsByType norm_neon = make_all_norm_kernels();
constexpr WeightGradientKernelsByType weight_gradient_neon = make_all_weight_gradient_kernels();
constexpr PointwiseKernelsByType pointwise_neon = make_all_pointwise_kernels();
constexpr SoftmaxKernels softmax_neon = make_softmax_kernels();
#else
constexpr DepthwiseKernelsByType depthwise_baseline = make_all_depthwise_kernels();
constexpr FilterKernels baseline = make_filter_kernels();
constexpr NormKernelsByType norm_baseline = make_all_norm_kernels();
constexpr WeightGradientKernelsByType weight_gradient_baseline = make_all_weight_gradient_kernels();
constexpr PointwiseKernelsByType pointwise_baseline = make_all_pointwise_kernels();
constexpr SoftmaxKernels softmax_baseline = make_softmax_kernels();
#endif

}  // namespace nhwc::cpu::isa
