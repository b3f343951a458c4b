// Headers of the standard library and of the compiler, so that what they define keeps the instruction set of everything
// else. Included before a level chooses its own.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu/filter_kernels.h"
#include "cpu/norm_kernels.h"
#include "cpu/softmax_kernels.h"

#define NHWC_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define NHWC_TARGET(features) NHWC_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define NHWC_TARGET_END NHWC_PRAGMA(clang attribute pop)
#else
#define NHWC_TARGET(features) NHWC_PRAGMA(GCC target(features))
#define NHWC_TARGET_END
#endif
