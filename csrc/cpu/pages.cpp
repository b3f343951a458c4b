#include "cpu/pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <string>

namespace nhwc::cpu {

#if defined(__linux__)

namespace {

constexpr uintptr_t huge_page = uintptr_t{2} << 20;

uintptr_t round_down(uintptr_t address, uintptr_t unit) { return address / unit * unit; }

// sysconf is not asked: on some machines it adds up the caches of CPUs that this one does not share.
int64_t last_level_cache_bytes() {
  int64_t bytes = 0;
  for (int level = 0; level < 5; ++level) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(level) + "/size");
    int64_t kilobytes = 0;
    if (file >> kilobytes) bytes = std::max(bytes, kilobytes << 10);
  }
  return bytes > 0 ? bytes : int64_t{32} << 20;
}

// Looks at three pages; asking for all of them would take as long as touching them.
bool is_resident(const at::Tensor& tensor) {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const uintptr_t last = begin + tensor.nbytes() - 1;
  for (const uintptr_t address : {begin, begin + tensor.nbytes() / 2, last}) {
    unsigned char state = 0;
    if (mincore(reinterpret_cast<void*>(round_down(address, page)), page, &state) != 0 || (state & 1) == 0)
      return false;
  }
  return true;
}

}  // namespace

void advise_huge_pages(const at::Tensor& fresh) {
  constexpr size_t worthwhile = 4 * huge_page;
  constexpr std::chrono::microseconds patience(1000);
  constexpr int most_passed_over = 15;
  // After each failure in a row about twice as many tensors are passed over.
  static std::atomic<int> failures = 0, left_to_pass_over = 0;
  if (fresh.nbytes() < worthwhile) return;
  if (left_to_pass_over > 0) {
    --left_to_pass_over;
    return;
  }
  const auto begin = reinterpret_cast<uintptr_t>(fresh.const_data_ptr());
  const uintptr_t end = round_down(begin + fresh.nbytes(), huge_page);
  for (uintptr_t page = round_down(begin + huge_page - 1, huge_page); page < end; page += huge_page) {
    if (madvise(reinterpret_cast<void*>(page), huge_page, MADV_HUGEPAGE) != 0) return;
    const auto start = std::chrono::steady_clock::now();
    *reinterpret_cast<volatile char*>(page) = 0;
    if (std::chrono::steady_clock::now() - start > patience) {
      failures = std::min(2 * failures + 1, most_passed_over);
      left_to_pass_over = failures.load();
      return;
    }
  }
  failures = 0;
}

bool is_worth_streaming(const at::Tensor& weight, const at::Tensor& out) {
  static const int64_t cache = last_level_cache_bytes();
  return static_cast<int64_t>(weight.nbytes() + out.nbytes()) > cache / 2 && is_resident(out);
}

#else

void advise_huge_pages(const at::Tensor&) {}

bool is_worth_streaming(const at::Tensor&, const at::Tensor&) { return false; }

#endif

}  // namespace nhwc::cpu
