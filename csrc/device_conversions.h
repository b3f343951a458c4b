// Conversions of weights that are not on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

#ifdef TORCH_NHWC_WITH_CUDA
#include "cuda/convert_weight.h"
#endif

namespace nhwc {

/// Conversions of weights on any devices but the CPU, collected and then run together: on CUDA devices by kernels of
/// ours, as few for all weights as can be; elsewhere by PyTorch's own copy, at once.
class DeviceConversions {
 public:
  /// The values of `weight` will go to `out`, as `nhwc::write_weights` has it. The caller keeps both alive.
  void add_write(const at::Tensor& weight, const at::Tensor& out);

  /// The bytes of a weight that `can_permute` will be permuted to the other order of filters, each in its own bytes.
  void add_permutation(const at::Tensor& weight);

  /// Allocates and checks what `run` needs.
  void allocate();

  /// Raises only if a device fails.
  void run() const;

 private:
#ifdef TORCH_NHWC_WITH_CUDA
  cuda::Conversions cuda_;
#endif
};

/// Whether the filters of a dense weight can be permuted in their own bytes, on its device.
bool can_permute(const at::Tensor& weight);

/// Whether what is done to this tensor is now recorded in a CUDA graph instead of being done.
bool is_captured(const at::Tensor& tensor);

}  // namespace nhwc
