// Makes the kernels of layers for one instruction set, which the including file chooses first.
#pragma once

#include "cpu/isa/make_depthwise_kernels.h"
#include "cpu/isa/make_inner_product_kernels.h"
#include "cpu/isa/make_norm_kernels.h"
#include "cpu/isa/make_output_kernels.h"
#include "cpu/isa/make_pointwise_kernels.h"
#include "cpu/isa/make_rms_kernels.h"
#include "cpu/isa/make_softmax_kernels.h"
#include "cpu/isa/make_weight_gradient_kernels.h"
#include "cpu/isa/make_winograd_kernels.h"
#include "cpu/kernels.h"

namespace nhwc {
inline namespace NHWC_CPU_LEVEL {

/// Calls `make` for the elements of each dtype.
template <typename Make>
constexpr auto by_type(const Make& make) {
  using Family = decltype(make.template operator()<float>());
  return cpu::ByType<Family>{make.template operator()<double>(), make.template operator()<float>(),
                             make.template operator()<Half>(), make.template operator()<BFloat16>()};
}

constexpr cpu::Kernels make_kernels() {
  return {.depthwise = by_type([]<typename Element> { return make_depthwise_kernels<Element>(); }),
          .inner_product = by_type([]<typename Element> { return make_inner_product_kernels<Element>(); }),
          .norm = by_type([]<typename Element> { return make_norm_kernels<Element>(); }),
          .output = make_output_kernels(),
          .pointwise = by_type([]<typename Element> { return make_pointwise_kernels<Element>(); }),
          .rms = by_type([]<typename Element> { return make_rms_kernels<Element>(); }),
          .softmax = make_softmax_kernels(),
          .weight_gradient = by_type([]<typename Element> { return make_weight_gradient_kernels<Element>(); }),
          .winograd = by_type([]<typename Element> { return make_winograd_kernels<Element>(); })};
}

}  // namespace NHWC_CPU_LEVEL
}  // namespace nhwc
