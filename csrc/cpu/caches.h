// The sizes of this CPU's caches, asked once.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// A core's own, 512 kB where the system does not tell.
int64_t second_level_cache_bytes();

/// 32 MB where the system does not tell.
int64_t last_level_cache_bytes();

}  // namespace nhwc::cpu
