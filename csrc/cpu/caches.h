// The size of this CPU's last level of cache, asked once.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// 32 MiB where the system does not say.
int64_t last_level_cache_bytes();

}  // namespace nhwc::cpu
