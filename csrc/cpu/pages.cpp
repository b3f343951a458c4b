#include "cpu/pages.h"

#include <c10/core/CPUAllocator.h>

#if defined(__linux__)
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

namespace nhwc::cpu {

#if defined(__linux__)

namespace {

constexpr uintptr_t huge_page = uintptr_t{2} << 20, pages_of_probe = 4;

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

// The processor's time: on a busy machine another thread may run in between.
int64_t nanoseconds_of_thread() {
  timespec time = {};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

void request_huge_pages(char* bytes, int64_t size) {
  constexpr int64_t worthwhile = 4 * huge_page;
  constexpr int64_t patience = 1'000'000;  // nanoseconds
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
  const auto advise = [](uintptr_t first, uintptr_t bytes) {
    return madvise(reinterpret_cast<void*>(first), bytes, MADV_HUGEPAGE) == 0;
  };
  uintptr_t page = round_down(begin + huge_page - 1, huge_page);
  for (; page < end; page += pages_of_probe * huge_page) {
    if (!advise(page, huge_page)) return;
    const int64_t start = nanoseconds_of_thread();
    *reinterpret_cast<volatile char*>(page) = 0;
    if (nanoseconds_of_thread() - start > patience) {
      failures = std::min(2 * failures + 1, most_skipped);
      left_to_skip = failures.load();
      return;
    }
    if (!advise(page, std::min(end - page, pages_of_probe * huge_page))) return;
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

void request_huge_pages(char*, int64_t) {}

bool prefault_pages(char*, int64_t) { return false; }

#endif

namespace {

thread_local bool are_requested = false;

/// PyTorch's allocator as it is, but for threads that request huge pages.
class RequestingAllocator final : public c10::Allocator {
 public:
  explicit RequestingAllocator(c10::Allocator* own) : own_(own) {}

  c10::DataPtr allocate(size_t size) override {
    c10::DataPtr memory = own_->allocate(size);
    if (are_requested) request_huge_pages(static_cast<char*>(memory.get()), static_cast<int64_t>(size));
    return memory;
  }
  bool is_simple_data_ptr(const c10::DataPtr& memory) const override { return own_->is_simple_data_ptr(memory); }
  c10::DeleterFnPtr raw_deleter() const override { return own_->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t size) const override { own_->copy_data(to, from, size); }

 private:
  c10::Allocator* own_;
};

#if defined(__linux__)
// PyTorch sets allocators while libraries are loaded, and keeps one of a higher priority.
[[maybe_unused]] const bool is_set = [] {
  c10::SetCPUAllocator(new RequestingAllocator(c10::GetCPUAllocator()));
  return true;
}();
#endif

}  // namespace

HugePages::HugePages() : before_(std::exchange(are_requested, true)) {}
HugePages::~HugePages() { are_requested = before_; }

}  // namespace nhwc::cpu
