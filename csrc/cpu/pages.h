// What the system's pages have to do with speed: the decisions about them, each at one place.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// Takes huge pages for bytes that are all about to be written, at least 8 MB that no page is there for yet: the system
/// hands a page out at its first use, which takes longer than writing it, and for a huge page less so. Only whole huge
/// pages inside of these bytes are asked for, so that the advice does not reach beyond them. They are touched one by
/// one, for as long as that is quick: where the system must move memory about for one, or a hypervisor has to find it,
/// the rest stay small, and so do the next ones asked for. Does nothing where the system has none.
void take_huge_pages(char* bytes, int64_t size);

/// Has the system hand out the pages of bytes that are about to be written, all at once: that takes about two thirds of
/// the time that it takes one by one, at their first use. It does nothing for less than 128 KB, nor where the system
/// has no such call, and it fails in silence, since the pages then come one by one.
///
/// @returns whether they were there already.
bool take_pages(char* bytes, int64_t size);

}  // namespace nhwc::cpu
