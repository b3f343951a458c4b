#include "cpu/dispatch.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace nhwc::cpu {
namespace {

// The last one in the list that the CPU supports is its best.
struct Level {
  std::string_view name;
  std::string_view aten_name;  // the corresponding ATEN_CPU_CAPABILITY
  bool is_supported;
  const Kernels* kernels;
  const FilterKernels* filters;
};

#if defined(__x86_64__)

bool is_amd_or_hygon() {
  constexpr unsigned int hygon = 0x6F677948;  // "Hygo"; not every compiler's header has it
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(0, &eax, &ebx, &ecx, &edx) && (ebx == signature_AMD_ebx || ebx == hygon);
}

// Not by __builtin_cpu_supports, which denies all features of vendors that the compiler does not know, such as Hygon.
__attribute__((target("xsave"))) bool has_avx2() {
  constexpr unsigned int of_leaf_1 = bit_FMA | bit_F16C | bit_OSXSAVE, of_leaf_7 = bit_AVX2 | bit_BMI2;
  constexpr unsigned int saved_by_system = 6;  // registers of 16 and of 32 bytes
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || (ecx & of_leaf_1) != of_leaf_1) return false;
  if ((_xgetbv(0) & saved_by_system) != saved_by_system) return false;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & of_leaf_7) == of_leaf_7;
}

// AMD's Zen 4 executes 64-byte shuffles in two halves: registers of 32 bytes are faster there.
bool splits_registers_of_64_bytes() {
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  return is_amd_or_hygon() && __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (eax >> 8 & 0xF) + (eax >> 20 & 0xFF) == 0x19;
}

FilterKernels best_avx512_vbmi() {
  const bool half_width = splits_registers_of_64_bytes();
  FilterKernels kernels = half_width ? isa::filter_avx512_vbmi_half_width : isa::filter_avx512_vbmi;
  if (__builtin_cpu_supports("avx512bf16")) {
    kernels.float_to_bfloat16 = half_width ? isa::float_to_bfloat16_half_width : isa::float_to_bfloat16;
  }
  return kernels;
}

std::vector<Level> all_levels() {
  __builtin_cpu_init();
  const bool avx2 = has_avx2();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool avx512_vbmi = avx512 && __builtin_cpu_supports("avx512vbmi");
  static const FilterKernels best_filters = best_avx512_vbmi();
  std::vector<Level> levels = {{"baseline", "default", true, &isa::baseline, &isa::filter_baseline},
                               {"avx2_128", "avx2", avx2, &isa::avx2, &isa::filter_avx2_128},
                               {"avx2", "avx2", avx2, &isa::avx2, &isa::filter_avx2},
                               {"avx512", "avx512", avx512, &isa::avx512, &isa::filter_avx512},
                               {"avx512_vbmi", "avx512", avx512_vbmi, &isa::avx512, &best_filters}};
  // Shuffles that cross the halves of 32 bytes take Zen 1 to 3 several times as long as those within 16.
  if (is_amd_or_hygon()) std::swap(levels[1], levels[2]);
  return levels;
}

#elif defined(__ARM_NEON)

std::vector<Level> all_levels() { return {{"neon", "default", true, &isa::neon, &isa::filter_neon}}; }

#else

std::vector<Level> all_levels() { return {{"baseline", "default", true, &isa::baseline, &isa::filter_baseline}}; }

#endif

std::string_view environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

Level choose_level() {
  std::vector<Level> levels = all_levels();
  std::erase_if(levels, [](const Level& level) { return !level.is_supported; });
  const std::string_view requested = environment("TORCH_NHWC_CPU_CAPABILITY");
  const std::string_view bound = environment("ATEN_CPU_CAPABILITY");
  std::string supported;
  for (const Level& level : levels) {
    if (level.name == requested) return level;
    supported += (supported.empty() ? "" : ", ") + std::string(level.name);
  }
  TORCH_CHECK_VALUE(requested.empty(), "TORCH_NHWC_CPU_CAPABILITY: expected one of those that this CPU has (",
                    supported, "), got '", requested, "'");
  const auto best =
      std::find_if(levels.rbegin(), levels.rend(), [&](const Level& level) { return level.aten_name == bound; });
  return best != levels.rend() ? *best : levels.back();
}

const Level& chosen_level() {
  static const Level level = choose_level();
  return level;
}

}  // namespace

const Kernels& level_kernels() { return *chosen_level().kernels; }

const FilterKernels& filter_kernels() { return *chosen_level().filters; }

NumberTransposes number_transposes(c10::ScalarType type) {
  const FilterKernels& kernels = filter_kernels();
  switch (type) {
    case c10::kDouble: return {kernels.transpose[3], kernels.transpose[3]};
    case c10::kFloat: return {kernels.transpose[2], kernels.transpose[2]};
    case c10::kHalf: return {kernels.half_to_float, kernels.float_to_half};
    default: TORCH_INTERNAL_ASSERT(type == c10::kBFloat16, "a kernel for ", type);
  }
  return {kernels.bfloat16_to_float, kernels.float_to_bfloat16};
}

std::string capability() { return std::string(chosen_level().name); }

}  // namespace nhwc::cpu
