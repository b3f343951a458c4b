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

/// What follows a norm in the same pass.
enum class ActivationKind : int { none, relu, leaky_relu, silu, gelu, gelu_tanh };
constexpr int activation_kinds = 6;
constexpr bool has_slopes(ActivationKind kind) { return kind == ActivationKind::leaky_relu; }
constexpr bool has_exponential(ActivationKind kind) { return kind > ActivationKind::leaky_relu; }

/// What a pass knows of each group (mean, reciprocal deviation) and channel (weight, bias, and the slope of leaky
/// ReLU), and the ceiling of ReLU.
struct NormNumbers {
  const double *mean, *rstd, *weight, *bias, *slope;
  double ceiling;
};

/// The passes after which, and before whose backward, an activation is computed: y = activation(norm(rows)). Where
/// they do not exist, as for doubles whose activation has exponentials, all are null.
struct NormPasses {
  /// out = activation((rows - mean) * rstd * weight + bias + residual); the residual may be null.
  void (*normalise)(const NormRows& shape, const void* rows, const void* residual, void* out,
                    const NormNumbers& numbers, double* scratch);

  /// Adds to each channel the sums of `g` and of `g * (rows - mean)`, where g is the gradient before the activation,
  /// which it also writes unless `before` is null.
  void (*backward_sums)(const NormRows& shape, const void* grad, const void* rows, void* before,
                        const NormNumbers& numbers, double* sum, double* product, double* scratch);

  /// Computes the gradient of the input from these sums over all the rows of a sample, `sample_rows`; without them
  /// (null), as where the statistics do not depend on the input.
  void (*backward)(const NormRows& shape, const void* grad, const void* rows, void* out, const NormNumbers& numbers,
                   const double* sum, const double* product, std::int64_t sample_rows, double* scratch);
};

/// Within a block of rows, sums are floats (doubles for doubles); across blocks they are doubles. What is given and
/// returned for each group or channel is doubles. `scratch` begins with a cache line, and has room for as many doubles
/// as the first function returns.
struct NormKernels {
  std::int64_t (*scratch)(std::int64_t channels);

  /// Computes each group's mean and the sum of squared deviations from it.
  void (*moments)(const NormRows& shape, const void* rows, double* mean, double* deviations, double* scratch);

  NormPasses with[activation_kinds];
};

}  // namespace nhwc::cpu
