// Decisions about the pages of memory, each in one place.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// Requests huge pages for at least 8 MB that are about to be written and have no pages yet: the system provides a page
/// at its first use, which takes longer than writing it, and huge pages take less. Only whole huge pages within these
/// bytes are requested, so that the advice does not affect other memory. They are touched one by one while that is
/// quick. If it is slow, because the system moves memory or a hypervisor has to find some, the rest stay small, and so
/// do the next requests. Does nothing if the system has no huge pages.
void prefault_huge_pages(char* bytes, int64_t size);

/// Requests all pages of bytes that are about to be written at once, which takes about two thirds of the time that
/// first uses take one by one. Does nothing for less than 128 KB, or if the system has no such call. A failure is
/// ignored: the pages then come one by one.
///
/// @returns whether the pages existed already.
bool prefault_pages(char* bytes, int64_t size);

}  // namespace nhwc::cpu
