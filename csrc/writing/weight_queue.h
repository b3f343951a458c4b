// Weights to write or to permute, on any devices: by kernels of ours where there are some, else by PyTorch's own copy.
#pragma once

#include <ATen/core/Tensor.h>

#include "cpu/filter_queue.h"
#include "cuda/filter_queue.h"

namespace nhwc {

/// What is queued is run together, by as few kernels as can be. The caller keeps the tensors alive.
class WeightQueue {
 public:
  /// The values of `weight` go to `out`: same shape and device, any strides that do not overlap, a memory of its own,
  /// and a dtype that `resolve_target` let pass. At once where no kernel of ours serves.
  void write_or_queue(const at::Tensor& weight, const at::Tensor& out);

  /// The bytes of a weight that `can_permute` will be permuted to the other order of filters, each in its own bytes.
  void add_permutation(const at::Tensor& weight);

  /// Allocates and checks what `run` needs.
  void allocate();

  /// Raises only if a device fails.
  void run() const;

 private:
  cpu::FilterQueue on_cpu_;
  cuda::FilterQueue on_cuda_;
};

/// Whether the filters of a dense weight can be permuted in their own bytes, on its device.
bool can_permute(const at::Tensor& weight);

}  // namespace nhwc
