#include "cpu/caches.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace nhwc::cpu {
namespace {

// Not by sysconf: on some machines it adds up the caches of CPUs that this one does not share.
int64_t largest_cache_bytes() {
  int64_t bytes = 0;
  for (int index = 0; index < 5; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size");
    int64_t kilobytes = 0;
    if (file >> kilobytes) bytes = std::max(bytes, kilobytes << 10);
  }
  return bytes > 0 ? bytes : int64_t{32} << 20;
}

}  // namespace

int64_t last_level_cache_bytes() {
  static const int64_t bytes = largest_cache_bytes();
  return bytes;
}

}  // namespace nhwc::cpu
