// The passes of group norm over channels-last rows, compiled for one instruction set. Uses neither torch nor code of
// the standard library, like filter_kernels.h.
#pragma once

#include <cstdint>

namespace nhwc::cpu {

/// A row is the channels of one voxel, and rows are dense. Within a block of rows, sums are floats (doubles for
/// doubles); across blocks they are doubles. `Real*` is `const float*` or, for doubles, `const double*`.
struct NormKernels {
  using Real = const void;

  /// Returns how many parameters the passes need, with those of the channels repeated: a multiple of the channels that
  /// fills whole registers.
  std::int64_t (*period)(std::int64_t channels);

  /// Writes these repetitions, in the order that the passes need, to `out`, which has room for a period.
  void (*spread)(const double* values, std::int64_t channels, std::int64_t period, void* out);

  /// Computes each channel's mean and the sum of squared deviations from it. `scratch` has room for seven periods of
  /// doubles.
  void (*moments)(const void* rows, std::int64_t count, std::int64_t channels, double* mean, double* deviations,
                  void* scratch);

  /// out = (rows - mean) * scale + shift.
  void (*normalise)(const void* rows, void* out, std::int64_t count, std::int64_t channels, Real* mean, Real* scale,
                    Real* shift);

  /// Adds to each channel the sums of `grad` and of `grad * (rows - mean)`. `scratch` as for `moments`.
  void (*backward_sums)(const void* grad, const void* rows, std::int64_t count, std::int64_t channels, Real* mean,
                        double* sum, double* product, void* scratch);

  /// out = of_grad * grad + of_rows * (rows - mean) + shift.
  void (*backward)(const void* grad, const void* rows, void* out, std::int64_t count, std::int64_t channels, Real* mean,
                   Real* of_grad, Real* of_rows, Real* shift);
};

}  // namespace nhwc::cpu
