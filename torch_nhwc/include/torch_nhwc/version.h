// The version of the public headers, for `#if TORCH_NHWC_VERSION >= ...` in code that includes them.
//
// Stability: within one major version the names, signatures and meanings declared in these headers stay, and additions
// keep existing code compiling. Before 1.0 a minor version may change them; docs/cpp.md says what changed.
#pragma once

#define TORCH_NHWC_VERSION_MAJOR 0
#define TORCH_NHWC_VERSION_MINOR 1
#define TORCH_NHWC_VERSION_PATCH 0

#define TORCH_NHWC_VERSION \
  (TORCH_NHWC_VERSION_MAJOR * 10000 + TORCH_NHWC_VERSION_MINOR * 100 + TORCH_NHWC_VERSION_PATCH)
