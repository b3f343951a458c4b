// How much work is worth another thread.
#pragma once

#include <ATen/Parallel.h>

namespace nhwc::cpu {

/// As in PyTorch's own loops over elements.
constexpr int64_t elements_worth_a_thread = 1 << 15;

}  // namespace nhwc::cpu
