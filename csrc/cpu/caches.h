// The size of this CPU's last level of cache, read once.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// Returns 32 MiB if the system does not report it.
int64_t last_level_cache_bytes();

}  // namespace nhwc::cpu
