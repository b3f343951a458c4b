#include "ops/convolution/faults.h"

#include <torch/headeronly/version.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <numeric>
#include <string>

#include "layout/channels_last.h"

namespace nhwc {
namespace {

/// Returns the bound that oneDNN reads from the environment when it is first used: the first variable that is not
/// empty, in lower case.
std::string bound_of_environment() {
  for (const char* name : {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"}) {
    const char* value = std::getenv(name);
    std::string bound = value ? value : "";
    std::transform(bound.begin(), bound.end(), bound.begin(), [](unsigned char c) { return std::tolower(c); });
    if (!bound.empty()) return bound;
  }
  return "";
}

OnednnIsa found_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool has_amx = __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx >> 22 & 1) != 0;  // its bfloat16 tiles
  const std::string bound = bound_of_environment();
  for (const char* lower : {"sse41", "avx", "avx2", "avx2_vnni", "avx2_vnni_2"}) {
    if (bound == lower) return OnednnIsa::below_avx512;
  }
  if (!has_avx512) return OnednnIsa::below_avx512;
  for (const char* lower : {"avx512_core", "avx512_core_vnni", "avx512_core_bf16", "avx512_core_fp16"}) {
    if (bound == lower) return OnednnIsa::avx512;
  }
  return has_amx ? OnednnIsa::amx : OnednnIsa::avx512;
#else
  return OnednnIsa::unknown;
#endif
}

}  // namespace

OnednnIsa onednn_isa() {
  static const OnednnIsa isa = found_isa();
  return isa;
}

}  // namespace nhwc

namespace nhwc::faults {
namespace {

/// The instruction sets of oneDNN that have a fault, and the first version of PyTorch (major * 100 + minor) whose
/// oneDNN is right: 0 where no such version is known. 2.11.0, 2.13.0 and 2.15.0 have all of them, but 2.15.0 less of
/// `halves_with_amx`. `make fuzz` measures them. Where the instruction set is unknown, all are expected.
struct Fault {
  OnednnIsa from;
  int mended_in;

  bool is_expected() const {
    constexpr int version = TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR;
    if (mended_in != 0 && version >= mended_in) return false;
    return onednn_isa() == OnednnIsa::unknown || onednn_isa() >= from;
  }
};
constexpr Fault small_inputs = {OnednnIsa::avx512, 0};
constexpr Fault strided_columns = {OnednnIsa::avx512, 0};
// Without AVX-512 with fewer than 8 channels, with it on several threads.
constexpr Fault strided_taps = {OnednnIsa::below_avx512, 0};
constexpr Fault halves = {OnednnIsa::avx512, 0};
constexpr Fault halves_with_amx = {OnednnIsa::amx, 0};

bool has_wrong_columns(const Call& call) {
  return call.stride.back() > 1 &&
         ((call.weight.sym_size(1) == 1 && strided_columns.is_expected()) || (call.is_half() && halves.is_expected()));
}

/// Returns whether a 2D kernel has one tap, strides, and so few channels that oneDNN computes its gradient wrong.
bool has_wrong_strided_tap(const Call& call) {
  if (call.axes() != 2 || !strided_taps.is_expected()) return false;
  if (call.weight.sym_size(2) != 1 || call.weight.sym_size(3) != 1 || call.weight.sym_size(1) >= 16) return false;
  return (call.stride[0] > 1 || call.stride[1] > 1) && call.may_derive_by_weight();
}

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

}  // namespace

bool has_one_column(const Call& call) {
  return !call.is_transposed && has_wrong_columns(call) && call.axis(1).positions == 1;
}

bool has_small_input(const Call& call) {
  return !call.is_transposed && (small_inputs.is_expected() ? call.misses_kernel() : call.misses_input());
}

c10::SymInt planes_under_a_tap(const Call& call) {
  const Axis depth = call.axis(3);
  return (depth.positions - 1) * depth.stride + depth.reach + 1 - depth.padding;
}

bool has_depth_under_no_tap(const Call& call) {
  if (call.is_transposed || call.axes() != 3 || !call.is_half()) return false;
  if (!halves_with_amx.is_expected() || !call.may_derive_by_input()) return false;
  const c10::SymInt planes = planes_under_a_tap(call);
  return planes > 0 && planes < call.input.sym_size(2);  // where all are under none, the input is padded first
}

bool has_strided_tap(const Call& call) {
  if (call.is_transposed || !has_wrong_strided_tap(call)) return false;
  return call.has_channels_last_weight() || call.has_channels_last_input();
}

bool has_one_transposed_column(const Call& call) {
  return call.is_transposed && has_wrong_columns(call) && call.input.sym_size(-1) == 1;
}

bool has_small_output(const Call& call) {
  return call.is_transposed && small_inputs.is_expected() && call.misses_kernel();
}

bool has_extended_tap(const Call& call) {
  if (!call.is_transposed || !has_wrong_strided_tap(call)) return false;
  return call.output_padding[0] > 0 || call.output_padding[1] > 0;
}

bool is_wrong_in_half_precision(const Call& call) {
  if (!halves.is_expected()) return false;
  const Axis width = call.axis(1);
  if (width.stride > 1 && width.padding > width.positions) return true;
  const c10::SymInt channels = call.weight.sym_size(1);
  if (call.input.scalar_type() == at::kBFloat16 && call.may_derive_by_weight() && is_dilated_wrong(call, channels)) {
    return true;
  }
  if (!halves_with_amx.is_expected()) return false;
  if (call.is_transposed && call.axes() == 3 && call.output_padding[0] > call.padding[0]) return true;
  return is_packed_wrong(call, channels.guard_int(__FILE__, __LINE__)) || skips_too_far(call);
}

}  // namespace nhwc::faults
