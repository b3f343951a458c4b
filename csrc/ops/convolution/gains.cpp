#include "ops/convolution/gains.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "cpu/dispatch.h"
#include "layout/channels_last.h"
#include "ops/convolution/faults.h"
#include "ops/convolution/float32.h"
#include "ops/convolution/kernels.h"
#include "ops/convolution/mended.h"

namespace nhwc {
namespace {

/// Returns whether the kernels take the tensors, and oneDNN would.
bool is_served(const Call& call) {
  const at::ScalarType type = call.input.scalar_type();
  if (type != at::kFloat && !at::isReducedFloatingType(type)) return false;
  if (call.weight.scalar_type() != type || (call.has_bias() && call.bias->scalar_type() != type)) return false;
  return !call.has_symbolic_sizes() && is_channels_last(call.input);
}

/// What the rules look at: of a transposed convolution, that from its output to its input.
struct Sizes {
  bool is_3d, is_strided = false, is_dilated = false;
  int64_t inputs, outputs;     // of a group
  int64_t taps = 1, shortest;  // of the kernel, and along its shortest axis
  int64_t positions;           // of the whole batch

  explicit Sizes(const Call& call);
};

Sizes::Sizes(const Call& call)
    : is_3d(call.axes() == 3),
      inputs(call.weight.size(1)),
      outputs(call.weight.size(0) / call.groups.expect_int()),
      shortest(call.weight.size(-1)),
      positions(call.input.size(0)) {
  for (int64_t from_last = 1; from_last <= static_cast<int64_t>(call.axes()); ++from_last) {
    const Axis axis = call.axis(from_last);
    const int64_t kernel = call.weight.size(-from_last);
    is_strided = is_strided || axis.stride > 1;
    is_dilated = is_dilated || call.dilation[call.axes() - from_last] > 1;
    taps *= kernel;
    shortest = std::min(shortest, kernel);
    positions *= axis.positions.expect_int();
  }
}

/// What PyTorch computes with.
enum class Arithmetic {
  below_avx512,  // always in float32
  avx512,        // in float32
  halves,        // in the half precision of AVX-512
};

// The rules. Their evidence is `bench_convolutions.py`, and grids of some 200 shapes around its layers: one thread of a
// Zen 4 and of a Xeon with AMX, as they are and held to AVX2. Where PyTorch is about as fast, it stays.

/// oneDNN's depthwise gradients reach a tenth of what its forward does. A transposed convolution is the gradient of the
/// input, and its own is a convolution.
Passes of_depthwise(const Call& call, const Sizes& sizes, Arithmetic arithmetic) {
  const bool is_large = sizes.shortest > 3, is_half = arithmetic == Arithmetic::halves;
  const bool smaller = is_large && !sizes.is_strided && arithmetic == Arithmetic::below_avx512;
  const bool larger = sizes.is_3d || (is_half ? sizes.is_strided : is_large && !sizes.is_strided);
  const bool weight = sizes.is_3d || is_large;
  return call.is_transposed ? Passes{larger, smaller, weight} : Passes{smaller, larger, weight};
}

/// oneDNN fills a part of its registers where a group has few channels. Its forward and its input gradient stay.
bool gains_grouped_weight_gradient(const Call& call, const Sizes& sizes, Arithmetic arithmetic) {
  if (call.is_transposed) return false;
  if (arithmetic == Arithmetic::halves) return sizes.inputs <= 4;
  const bool has_avx512 = arithmetic == Arithmetic::avx512;
  return sizes.is_strided ? !has_avx512 && sizes.inputs > 8 && sizes.inputs != 16
                          : sizes.inputs >= 4 && (sizes.inputs <= 8 || !has_avx512);
}

/// Below AVX-512 oneDNN's dense weight gradient reaches a half of its forward. With it, it is slow where it transposes
/// the weight for few positions, and where registers are not filled.
bool gains_dense_weight_gradient(const Sizes& sizes, Arithmetic arithmetic) {
  if (sizes.taps == 1) return false;  // one matrix product
  if (arithmetic == Arithmetic::below_avx512) return sizes.inputs >= (sizes.is_3d ? 8 : 4);
  const bool is_half = arithmetic == Arithmetic::halves;
  if (sizes.inputs < 16) return false;
  if (sizes.outputs <= (is_half ? 4 : 8)) return true;
  if (sizes.shortest < 3) return false;
  if (sizes.is_3d) return sizes.positions <= 128 && sizes.inputs >= (is_half ? 256 : 128);
  if (is_half) return false;
  return sizes.positions <= 512 || (sizes.is_strided && !sizes.is_dilated && sizes.inputs >= 32) ||
         (sizes.inputs < 64 && sizes.inputs % 16 != 0);
}

/// Returns whether the instruction sets are those that the rules were measured with.
bool is_measured() {
  static const bool is = onednn_isa() != OnednnIsa::unknown && cpu::capability().starts_with("avx");
  return is;
}

}  // namespace

Passes passes_of_kernels(const Call& call) {
  if (!call.may_use_kernels || !is_served(call)) return {};
  const bool is_cast = needs_float32(call), is_in_float32 = is_cast || call.input.scalar_type() == at::kFloat;
  const Sizes sizes(call);
  // Our kernels need none of the ways around faults.
  const bool is_mended = mended::is_needed(call);
  if (is_mended && call.is_depthwise()) return {true, true, true};
  if (call.is_depthwise() && is_cast) return {true, true, true};
  if (is_mended || !is_measured()) return {};
  const Arithmetic arithmetic = onednn_isa() == OnednnIsa::below_avx512 ? Arithmetic::below_avx512
                                : is_in_float32                         ? Arithmetic::avx512
                                                                        : Arithmetic::halves;
  if (call.is_depthwise()) return of_depthwise(call, sizes, arithmetic);
  if (call.groups > 1) return {false, false, gains_grouped_weight_gradient(call, sizes, arithmetic)};
  if (sizes.positions >= 1024 && kernels::is_pointwise(call)) {  // for fewer, calls take longer than products
    const bool gains = std::max(sizes.inputs, sizes.outputs) <= 4 || arithmetic != Arithmetic::halves;
    return {gains, gains, true};
  }
  return {false, false, gains_dense_weight_gradient(sizes, arithmetic)};
}

}  // namespace nhwc
