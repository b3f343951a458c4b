// What planes of floats have in common, `[channels, pixels]`, in which kernels have a register of neighbouring pixels.
// Shared like axes.h.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// The pixels of a plane are a multiple of this many.
constexpr std::int64_t plane_pixels = 16;

}  // namespace nhwc::cpu
