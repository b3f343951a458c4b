// The instruction set that a source file is compiled for.
//
// All code that depends on it is in an inline namespace with its name. Otherwise functions of one name that are
// compiled for several instruction sets and linked into one program would be merged into one version, and an older CPU
// would execute instructions that it does not have.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// On x86-64: 1 SSE2, 2 AVX2 with F16C, 3 AVX-512 (F, BW, DQ, VL), 4 with VBMI, 5 with BF16; elsewhere 0. A file that
// chooses its instruction set by a pragma or an attribute must define the level, since compilers define nothing there.
#if !defined(NHWC_X86_LEVEL)
#if !defined(__x86_64__)
#define NHWC_X86_LEVEL 0
#elif !defined(__AVX2__) || !defined(__F16C__)
#define NHWC_X86_LEVEL 1
#elif !defined(__AVX512BW__) || !defined(__AVX512DQ__) || !defined(__AVX512VL__)
#define NHWC_X86_LEVEL 2
#elif !defined(__AVX512VBMI__)
#define NHWC_X86_LEVEL 3
#elif !defined(__AVX512BF16__)
#define NHWC_X86_LEVEL 4
#else
#define NHWC_X86_LEVEL 5
#endif
#endif

// Whether there are shuffles of registers, or plain loops: without __builtin_shufflevector (GCC before 12, and
// compilers that are neither GCC nor Clang).
#if !defined(__has_builtin) || defined(__CUDACC__)
#define NHWC_HAS_SHUFFLES 0
#elif !__has_builtin(__builtin_shufflevector)
#define NHWC_HAS_SHUFFLES 0
#else
#define NHWC_HAS_SHUFFLES 1
#endif

// The size in bytes of the smallest element that one instruction shuffles at will. SSE2 only unpacks and packs smaller
// ones, which serves rounds of two piles.
#if NHWC_X86_LEVEL == 1 && !defined(__SSSE3__)
#define NHWC_SMALLEST_SHUFFLED 4
#else
#define NHWC_SMALLEST_SHUFFLED 1
#endif

// The level's name, and the bytes of its vector registers.
#if !NHWC_HAS_SHUFFLES
#define NHWC_CPU_LEVEL plain_loops
#elif NHWC_X86_LEVEL == 5
#define NHWC_CPU_LEVEL avx512_bf16
#elif NHWC_X86_LEVEL == 4
#define NHWC_CPU_LEVEL avx512_vbmi
#elif NHWC_X86_LEVEL == 3
#define NHWC_CPU_LEVEL avx512
#elif NHWC_X86_LEVEL == 2
#define NHWC_CPU_LEVEL avx2
#elif defined(__ARM_NEON)
#define NHWC_CPU_LEVEL neon
#elif defined(__SSSE3__)
#define NHWC_CPU_LEVEL ssse3
#else
#define NHWC_CPU_LEVEL baseline
#endif
#define NHWC_REGISTER_BYTES (!NHWC_HAS_SHUFFLES || NHWC_X86_LEVEL < 2 ? 16 : NHWC_X86_LEVEL == 2 ? 32 : 64)

#if defined(__GNUC__)
#define NHWC_ALWAYS_INLINE __attribute__((always_inline)) inline
#else
#define NHWC_ALWAYS_INLINE inline
#endif
