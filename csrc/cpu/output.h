// What follows a convolution by our own kernels: a residual and an activation, while its results are in a cache.
#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/group_norm.h"

namespace nhwc::cpu {

/// What the results of a task may have at most to be in a cache when they are finished.
inline constexpr int64_t most_finished = 1 << 18;

/// result = activation(result + residual), of floats. The residual has the strides of the result, or is undefined.
struct Output {
  at::Tensor residual;
  Activation activation;

  bool is_empty() const { return !residual.defined() && activation.kind == ActivationKind::none; }

  /// Finishes so many neighbouring results, the first of which is at `first`.
  void finish(const at::Tensor& result, const void* first, int64_t count) const;

  /// Finishes all of them.
  void finish(const at::Tensor& result) const;
};

}  // namespace nhwc::cpu
