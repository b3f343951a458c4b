// The kernels of layers, compiled for one instruction set each. Uses neither torch nor code of the standard library,
// like filter_kernels.h.
#pragma once

#include "cpu/depthwise_kernels.h"
#include "cpu/inner_product_kernels.h"
#include "cpu/norm_kernels.h"
#include "cpu/output_kernels.h"
#include "cpu/pointwise_kernels.h"
#include "cpu/rms_kernels.h"
#include "cpu/softmax_kernels.h"
#include "cpu/weight_gradient_kernels.h"
#include "cpu/winograd_kernels.h"

namespace nhwc::cpu {

/// The kernels of a family for each dtype.
template <typename Family>
struct ByType {
  Family of_double, of_float, of_half, of_bfloat16;
};

/// A family without dtypes computes on floats, and its driver casts.
struct Kernels {
  ByType<DepthwiseKernels> depthwise;
  ByType<InnerProductKernels> inner_product;
  ByType<NormKernels> norm;
  OutputKernels output;
  ByType<PointwiseKernels> pointwise;
  ByType<RmsKernels> rms;
  SoftmaxKernels softmax;
  ByType<WeightGradientKernels> weight_gradient;
  ByType<WinogradKernels> winograd;
};

namespace isa {

extern const Kernels baseline, avx2, avx512, neon;

}  // namespace isa
}  // namespace nhwc::cpu
