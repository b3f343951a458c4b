// The passes of group norm over channels-last rows, compiled for one instruction set. Uses neither torch nor code of
// the standard library, like filter_kernels.h.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// Rows `[count, channels]`: a row is the channels of one voxel, and rows are dense. A group is of neighbouring
/// channels.
struct NormRows {
  std::int64_t count, channels, groups;
};

/// Within a block of rows, sums are floats (doubles for doubles); across blocks they are doubles. What is given and
/// returned for each group or channel is doubles. `scratch` begins with a cache line, and has room for as many doubles
/// as the first function returns.
struct NormKernels {
  std::int64_t (*scratch)(std::int64_t channels);

  /// Computes each group's mean and the sum of squared deviations from it.
  void (*moments)(const NormRows& shape, const void* rows, double* mean, double* deviations, double* scratch);

  /// out = (rows - mean) * rstd * weight + bias, where the mean and the reciprocal deviation are the group's.
  void (*normalise)(const NormRows& shape, const void* rows, void* out, const double* mean, const double* rstd,
                    const double* weight, const double* bias, double* scratch);

  /// Adds to each channel the sums of `grad` and of `grad * (rows - mean)`.
  void (*backward_sums)(const NormRows& shape, const void* grad, const void* rows, const double* mean, double* sum,
                        double* product, double* scratch);

  /// Computes the gradient of the input from these sums over all the rows of a sample, `sample_rows`.
  void (*backward)(const NormRows& shape, const void* grad, const void* rows, void* out, const double* mean,
                   const double* rstd, const double* weight, const double* sum, const double* product,
                   std::int64_t sample_rows, double* scratch);
};

}  // namespace nhwc::cpu
