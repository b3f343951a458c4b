// Decisions about the pages of memory, each in one place.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// Requests huge pages for at least 8 MB that are about to be written and have no pages yet: the system provides a page
/// at its first use, which takes longer than writing it, and huge pages take less. Only whole huge pages within these
/// bytes are requested, so that the advice does not affect other memory. One of each four is touched. If that is slow,
/// because the system moves memory or a hypervisor has to find some, the rest stay small, and so do the next requests.
/// The others come when they are written, which is then faster, and by the threads that write them. Does nothing if the
/// system has no huge pages.
void request_huge_pages(char* bytes, int64_t size);

/// While one exists, huge pages are requested for all that its thread gets from PyTorch's allocator: outputs, gradients
/// and temporary memory of our operators, and of PyTorch's that they call, which take no output to write to. What they
/// leave in inference is kept for the next ones, up to 128 MB, unless the environment variable TORCH_NHWC_KEPT_MEMORY
/// is 0.
class HugePages {
 public:
  HugePages();
  ~HugePages();
  HugePages(const HugePages&) = delete;
  HugePages& operator=(const HugePages&) = delete;

 private:
  bool before_;
};

/// Requests all pages of bytes that are about to be written at once, which takes about two thirds of the time that
/// first uses take one by one. Does nothing for less than 128 KB, or if the system has no such call. A failure is
/// ignored: the pages then come one by one.
///
/// @returns whether the pages existed already.
bool prefault_pages(char* bytes, int64_t size);

}  // namespace nhwc::cpu
