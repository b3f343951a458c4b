// Inner products of windows and the rows of a weight as it is, compiled for one instruction set. Uses neither torch nor
// code of the standard library, like filter_kernels.h.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// Some rows of a weight and the windows of some positions, or a part of both: runs of neighbouring numbers, which
/// follow each other in a row.
struct InnerProducts {
  const void* weight;  // of the first row
  std::int64_t rows, row_step;
  bool has_next;  // as many rows, which are fetched meanwhile

  const void* const* windows;  // `[runs][positions]`: where each run begins
  std::int64_t positions, runs, length;
  std::int64_t offset;  // of the numbers in a run of the windows

  float* sums;  // `[positions][rows_at_once]` registers, from part to part
  bool is_first, is_last;

  // For the last part.
  const float* bias;  // of the rows, or null
  void* out;          // `[positions][rows]`
  std::int64_t out_step;
};

/// There are none for doubles.
struct InnerProductKernels {
  std::int64_t lanes;         // floats of a register
  std::int64_t rows_at_once;  // the most rows; positions may be any number
  void (*multiply)(const InnerProducts& products);
};

}  // namespace nhwc::cpu
