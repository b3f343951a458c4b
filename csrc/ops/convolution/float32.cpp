#include "ops/convolution/float32.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>

#include "ops/convolution/faults.h"

namespace nhwc {
namespace {

// The rules of what oneDNN 3.12 computes wrong were found by 33,000 random convolutions with and without AMX, half of
// them by reading its sources, too. The larger side is the input, of transposed convolutions the output.

/// Returns whether AMX multiplies by weights whose taps were packed as if each had 32 channels: one along the width (or
/// along the height of a kernel without width), or those that a stride folds into channels.
bool is_packed_wrong(const Call& call, int64_t channels) {
  if (channels % 2 != 0 || channels >= 32) return false;
  const auto number = [](const c10::SymInt& size) { return size.guard_int(__FILE__, __LINE__); };
  const auto is_packed = [&](int64_t taps) { return channels * taps > 32 && channels * taps % 32 == 0; };
  const Axis width = call.axis(1);
  const int64_t kernel = number(call.weight.sym_size(-1)), stride = number(width.stride);
  if (call.dilation.back() == 1 && channels < 16 && is_packed(kernel)) return true;
  if (call.axes() == 2 && kernel == 1 && channels < 16 && call.dilation[0] == 1 && call.dilation[1] == 1 &&
      is_packed(number(call.weight.sym_size(2))) && (width.positions > 48 || width.positions % 16 == 0)) {
    return true;
  }
  if (call.groups != 1 || width.padding != 0 || call.dilation.back() != 1 || stride == 1) return false;
  const int64_t divisor = std::gcd(std::gcd(kernel, stride), number(width.size));
  for (int64_t folded = 2; folded <= divisor; ++folded) {
    if (divisor % folded == 0 && is_packed(folded)) return true;
  }
  return false;
}

/// Returns whether AMX skips more rows or planes than its copy of the input has room for.
bool skips_too_far(const Call& call) {
  bool has_taps_or_padding = false, skips = false;
  for (size_t index = 0; index < call.axes(); ++index) {
    const c10::SymInt kernel = call.weight.sym_size(static_cast<int64_t>(index) + 2);
    has_taps_or_padding = has_taps_or_padding || kernel != 1 || call.padding[index] != 0;
    skips = skips || (index + 1 < call.axes() && call.stride[index] > kernel);
  }
  return has_taps_or_padding && skips;
}

/// Returns whether bfloat16 weight gradients are wrong because the kernel is dilated along the height, or a depthwise
/// one along any axis: registers of 16 channels that are not full are read from beyond a row.
bool is_dilated_wrong(const Call& call, const c10::SymInt& channels) {
  const auto is_dilated = [](const c10::SymInt& each) { return each > 1; };
  if (call.is_depthwise()) return std::any_of(call.dilation.begin(), call.dilation.end(), is_dilated);
  return is_dilated(call.dilation[call.axes() - 2]) && channels % 16 != 0 && (call.groups > 1 || channels > 16);
}

/// Returns whether PyTorch's result or a gradient is wrong.
bool is_wrong(const Call& call) {
  const ConvolutionFaults& faults = convolution_faults();
  if (!faults.halves) return false;
  const Axis width = call.axis(1);
  if (width.stride > 1 && width.padding > width.positions) return true;
  const c10::SymInt channels = call.weight.sym_size(1);
  if (call.input.scalar_type() == at::kBFloat16 && has_gradient_to_come(call.weight) &&
      is_dilated_wrong(call, channels)) {
    return true;
  }
  if (!faults.halves_with_amx) return false;
  if (call.is_transposed && call.axes() == 3 && call.output_padding[0] > call.padding[0]) return true;
  return is_packed_wrong(call, channels.guard_int(__FILE__, __LINE__)) || skips_too_far(call);
}

}  // namespace

bool needs_float32(const Call& call) {
  const at::ScalarType type = call.input.scalar_type();
  if (type != at::kBFloat16 && type != at::kHalf) return false;
  if (call.weight.scalar_type() != type || (call.has_bias() && call.bias->scalar_type() != type)) return false;
  // PyTorch's own product of what oneDNN does not take is 8 to 160 times slower than a convolution in float32.
  return !is_onednns(call.backend()) || is_wrong(call);
}

}  // namespace nhwc
