// Weights to write or to permute, on any devices: by our kernels where there are some, otherwise by PyTorch's copy.
#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/filter_batch.h"
#include "cuda/filter_batch.h"

namespace nhwc {

/// A batch runs together, in as few kernels as possible. The caller keeps the tensors alive.
class WeightBatch {
 public:
  /// Adds a write of the values of `weight` to `out`, which has the same shape and device, strides that do not overlap,
  /// its own memory, and a dtype that `resolve_target` accepted. Writes at once where none of our kernels serves.
  void write_or_add(const at::Tensor& weight, const at::Tensor& out);

  /// Adds a permutation of a weight that `can_permute` to the other order of filters, each in its own bytes.
  void add_permutation(const at::Tensor& weight);

  /// Allocates and checks everything that `run` needs.
  void allocate();

  /// Runs the batch. Raises only if a device fails.
  void run() const;

 private:
  cpu::FilterBatch on_cpu_;
  cuda::FilterBatch on_cuda_;
};

/// Returns whether the filters of a dense weight can be permuted in their own bytes, on its device.
bool can_permute(const at::Tensor& weight);

}  // namespace nhwc
