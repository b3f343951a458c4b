#include "cpu/pages.h"

#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#if defined(__linux__)
#include <malloc.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <new>
#include <string_view>
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

#if defined(__linux__)

/// Freed memory of results, which the next ones of about that size get: the system takes back what glibc's allocator
/// frees, and provides each page anew at its first use, which is up to a fifth of a network's time. Smaller memory
/// glibc keeps itself. What does not fit is not kept: networks ask for the same sizes in turn, and would find nothing
/// of what they need next if older memory made room. What nobody asked for in a while makes room.
///
/// glibc's allocator maps what is larger than all that was freed, up to 32 MB, and trims its heap by twice that size.
/// It is given back the first memory of each larger size, so that smaller memory has the heap that it has without this.
///
/// Where another thread is here nothing is kept or found, so that a process which is forked at that moment goes on.
class KeptMemory {
 public:
  static constexpr size_t least = size_t{8} << 20, most = size_t{128} << 20;

  explicit KeptMemory(c10::DeleterFnPtr free) : free_(free) {}

  /// Returns memory of at least so many bytes, or null.
  void* take(size_t size) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return nullptr;
    ++now_;
    const auto first = blocks_.lower_bound(size);
    if (first == blocks_.end() || first->first > size + size / 8) return nullptr;
    return taken(std::prev(blocks_.upper_bound(first->first)));  // the last one, of which caches may have a part
  }

  /// Frees all.
  void clear() {
    if (total_ == 0) return;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    while (lock && !blocks_.empty()) free_(taken(blocks_.begin()));
  }

  /// Keeps memory of so many bytes, or frees it.
  void keep_or_free(void* memory, size_t size) {
    if (!keep(memory, size)) free_(memory);
  }

 private:
  struct Block {
    void* memory;
    int64_t kept_at;
  };
  using Blocks = std::multimap<size_t, Block>;  // by size

  void* taken(Blocks::iterator block) {
    void* memory = block->second.memory;
    total_ -= block->first;
    blocks_.erase(block);
    return memory;
  }

  bool keep(void* memory, size_t size) {
    constexpr int64_t a_while = 64;  // requests, which are large: some calls of most networks
    constexpr size_t most_of_heap = size_t{32} << 20;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return false;
    if (size > largest_freed_ && size <= most_of_heap) {
      largest_freed_ = size;
      return false;
    }
    for (auto each = blocks_.begin(); total_ + size > most && each != blocks_.end();) {
      const auto block = each++;
      if (now_ - block->second.kept_at > a_while) free_(taken(block));
    }
    if (total_ + size > most) return false;
    try {
      blocks_.emplace(size, Block{memory, now_});
    } catch (const std::bad_alloc&) {
      return false;
    }
    total_ += size;
    return true;
  }

  std::mutex mutex_;
  Blocks blocks_;
  c10::DeleterFnPtr free_;
  std::atomic<size_t> total_ = 0;
  size_t largest_freed_ = 0;  // of what could have been kept
  int64_t now_ = 0;
};

/// PyTorch's allocator as it is, but for threads that request huge pages, which keep what is freed.
class RequestingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    if (!are_requested) return own().allocate(size);
    const bool is_large = size >= KeptMemory::least && is_on();
    const bool is_kept = is_large && !may_be_derived();
    if (is_large && !is_kept) kept().clear();  // a step takes no more memory than without
    if (void* memory = is_kept ? kept().take(size) : nullptr) return {memory, memory, &give_back, at::kCPU};
    c10::DataPtr memory = own().allocate(size);
    request_huge_pages(static_cast<char*>(memory.get()), static_cast<int64_t>(size));
    if (is_kept && own().is_simple_data_ptr(memory)) {
      void* bytes = memory.release_context();
      return {bytes, bytes, &give_back, at::kCPU};
    }
    return memory;
  }
  bool is_simple_data_ptr(const c10::DataPtr& memory) const override { return own().is_simple_data_ptr(memory); }
  c10::DeleterFnPtr raw_deleter() const override { return own().raw_deleter(); }
  void copy_data(void* to, const void* from, size_t size) const override { own().copy_data(to, from, size); }

  static c10::Allocator& own() {
    static c10::Allocator* const before = c10::GetCPUAllocator();
    return *before;
  }

 private:
  static KeptMemory& kept() {
    static auto* const memory = new KeptMemory(own().raw_deleter());  // tensors may outlive static objects
    return *memory;
  }
  /// A profiler of memory sees what is allocated and freed.
  static bool is_on() {
    static const char* const setting = std::getenv("TORCH_NHWC_KEPT_MEMORY");
    static const bool is_set = setting == nullptr || std::string_view(setting) != "0";
    return is_set && !c10::memoryProfilingEnabled();
  }
  /// Returns whether this is a part of a step, forward or backward.
  static bool may_be_derived() {
    return c10::GradMode::is_enabled() || torch::autograd::get_current_graph_task_id() != -1;
  }
  static void give_back(void* memory) {
    if (!is_on()) return own().raw_deleter()(memory);
    kept().keep_or_free(memory, malloc_usable_size(memory));
  }
};

// PyTorch sets allocators while libraries are loaded, and keeps one of a higher priority.
[[maybe_unused]] const bool is_set = [] {
  RequestingAllocator::own();
  c10::SetCPUAllocator(new RequestingAllocator);
  return true;
}();

#endif

}  // namespace

HugePages::HugePages() : before_(std::exchange(are_requested, true)) {}
HugePages::~HugePages() { are_requested = before_; }

}  // namespace nhwc::cpu
