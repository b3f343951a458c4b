// Headers of the standard library and of the compiler. They are included before a file chooses its instruction set, so
// that their definitions keep the instruction set of all other files.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/filter_kernels.h"
#include "cpu/kernels.h"

#define NHWC_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define NHWC_TARGET(features) NHWC_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define NHWC_TARGET_END NHWC_PRAGMA(clang attribute pop)
#else
#define NHWC_TARGET(features) NHWC_PRAGMA(GCC target(features))
#define NHWC_TARGET_END
#endif
