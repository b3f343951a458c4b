#include "cpu/pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>

namespace nhwc::cpu {

#if defined(__linux__)

namespace {

constexpr uintptr_t huge_page = uintptr_t{2} << 20;

uintptr_t round_down(uintptr_t address, uintptr_t unit) { return address / unit * unit; }

uintptr_t page_of(uintptr_t address) {
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return round_down(address, page);
}

// Checks three pages: a check of all would take as long as touching them.
bool are_resident(const char* bytes, int64_t size) {
  const auto begin = reinterpret_cast<uintptr_t>(bytes);
  for (const uintptr_t address : {begin, begin + size / 2, begin + size - 1}) {
    unsigned char state = 0;
    if (mincore(reinterpret_cast<void*>(page_of(address)), 1, &state) != 0 || (state & 1) == 0) return false;
  }
  return true;
}

}  // namespace

void prefault_huge_pages(char* bytes, int64_t size) {
  constexpr int64_t worthwhile = 4 * huge_page;
  constexpr std::chrono::microseconds patience(1000);
  constexpr int most_skipped = 15;
  // Each consecutive failure doubles the number of tensors that are skipped.
  static std::atomic<int> failures = 0, left_to_skip = 0;
  if (size < worthwhile || are_resident(bytes, size)) return;
  if (left_to_skip > 0) {
    --left_to_skip;
    return;
  }
  const auto begin = reinterpret_cast<uintptr_t>(bytes);
  const uintptr_t end = round_down(begin + size, huge_page);
  for (uintptr_t page = round_down(begin + huge_page - 1, huge_page); page < end; page += huge_page) {
    if (madvise(reinterpret_cast<void*>(page), huge_page, MADV_HUGEPAGE) != 0) return;
    const auto start = std::chrono::steady_clock::now();
    *reinterpret_cast<volatile char*>(page) = 0;
    if (std::chrono::steady_clock::now() - start > patience) {
      failures = std::min(2 * failures + 1, most_skipped);
      left_to_skip = failures.load();
      return;
    }
  }
  failures = 0;
}

bool prefault_pages(char* bytes, int64_t size) {
  constexpr int64_t worthwhile = 128 << 10;
  constexpr int populate_write = 23;  // MADV_POPULATE_WRITE, since Linux 5.14; older headers do not have it
  if (size < worthwhile) return true;
  if (are_resident(bytes, size)) return true;
  const auto begin = reinterpret_cast<uintptr_t>(bytes);
  const uintptr_t first = page_of(begin);
  madvise(reinterpret_cast<void*>(first), begin + size - first, populate_write);
  return false;
}

#else

void prefault_huge_pages(char*, int64_t) {}

bool prefault_pages(char*, int64_t) { return false; }

#endif

}  // namespace nhwc::cpu
