// What the system's pages have to do with speed: the two decisions about them, each at one place.
#pragma once

#include <ATen/core/Tensor.h>

namespace nhwc::cpu {

/// Takes huge pages for a new, untouched tensor of at least 8 MB: the system hands a page out at its first use, which
/// takes longer than writing it, and for a huge page less so. Only whole huge pages inside of the tensor are asked for,
/// so that the advice does not reach beyond it. They are touched one by one, for as long as that is quick: where the
/// system must move memory about for one, or a hypervisor has to find it, the rest stay small, and so do the next
/// tensors'. Does nothing where the system has none.
void advise_huge_pages(const at::Tensor& fresh);

/// Whether `out` should be written by non-temporal stores: together with the weight it is more than half of the last
/// level of cache, so that nothing of it would be found there later; and its pages are resident, since the system's
/// clearing of a new page brings it into the cache.
bool is_worth_streaming(const at::Tensor& weight, const at::Tensor& out);

}  // namespace nhwc::cpu
