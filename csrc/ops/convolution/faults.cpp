#include "ops/convolution/faults.h"

#include <torch/headeronly/version.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <string>

namespace nhwc {
namespace {

// The table of faults. `mended_in` is the first version of PyTorch (major * 100 + minor) whose oneDNN is right, and 0
// where no such version is known: 2.11.0, 2.13.0 and 2.15.0 have all of them, but 2.15.0 less of `halves_with_amx`.
// `tools/fuzz/convolutions.py` finds them. Where the instruction set is unknown, all are expected.
struct Fault {
  OnednnIsa from;
  int mended_in;
};
constexpr Fault small_inputs = {OnednnIsa::avx512, 0};
constexpr Fault strided_columns = {OnednnIsa::avx512, 0};
// Without AVX-512 with fewer than 8 channels, with it on several threads.
constexpr Fault strided_taps = {OnednnIsa::below_avx512, 0};
constexpr Fault halves = {OnednnIsa::avx512, 0};
constexpr Fault halves_with_amx = {OnednnIsa::amx, 0};

// Returns the bound that oneDNN reads from the environment when it is first used: the first variable that is not empty,
// in lower case.
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

bool is_expected(const Fault& fault) {
  constexpr int version = TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR;
  if (fault.mended_in != 0 && version >= fault.mended_in) return false;
  return onednn_isa() == OnednnIsa::unknown || onednn_isa() >= fault.from;
}

}  // namespace

OnednnIsa onednn_isa() {
  static const OnednnIsa isa = found_isa();
  return isa;
}

const ConvolutionFaults& convolution_faults() {
  static const ConvolutionFaults faults = {is_expected(small_inputs), is_expected(strided_columns),
                                           is_expected(strided_taps), is_expected(halves),
                                           is_expected(halves_with_amx)};
  return faults;
}

}  // namespace nhwc
