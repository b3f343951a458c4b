#include "cpu/caches.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace nhwc::cpu {
namespace {

// sysconf is not asked: on some machines it adds up the caches of CPUs that this one does not share. `least` is of the
// levels; instructions have a cache of their own at the first one only.
int64_t largest_from_level(int least, int most, int64_t otherwise) {
  int64_t bytes = 0;
  for (int index = 0; index < 5; ++index) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index);
    std::ifstream level_file(folder + "/level"), size_file(folder + "/size");
    int level = 0;
    int64_t kilobytes = 0;
    if (level_file >> level && size_file >> kilobytes && level >= least && level <= most) {
      bytes = std::max(bytes, kilobytes << 10);
    }
  }
  return bytes > 0 ? bytes : otherwise;
}

}  // namespace

int64_t second_level_cache_bytes() {
  static const int64_t bytes = largest_from_level(2, 2, int64_t{512} << 10);
  return bytes;
}

int64_t last_level_cache_bytes() {
  static const int64_t bytes = largest_from_level(1, 9, int64_t{32} << 20);
  return bytes;
}

}  // namespace nhwc::cpu
