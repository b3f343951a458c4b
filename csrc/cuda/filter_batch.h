// Weights on CUDA devices. The filters of all weights of a device are one list, and one kernel takes as many weights as
// fit into its arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "torch_nhwc/cuda/launch.h"

namespace nhwc::cuda {

/// CUDA weights to write or to permute together, on the current stream of each weight's device. The caller keeps them
/// alive. A library that is built without CUDA serves none: no_cuda/filter_batch.cpp.
class FilterBatch {
 public:
  /// Adds a write of the values of `weight` to `out`, as in `WeightBatch`. Returns false where no kernel serves.
  bool add_write(const at::Tensor& weight, const at::Tensor& out);

  /// Adds a permutation of a weight whose filters are channels-first or channels-last to the other order.
  void add_permutation(const at::Tensor& weight);

  /// Plans the launches, allocates their scratch memory, and prepares the kernels.
  void allocate();

  /// Launches the kernels. Raises only if a device fails.
  void run() const;

 private:
  struct OnDevice {
    at::Device device;
    std::vector<Weight> weights = {};
    std::vector<Launch> launches = {};
    at::Tensor scratch = {};
  };
  std::vector<Weight>& weights_on(at::Device device);

  std::vector<OnDevice> devices_;
};

/// Returns whether the kernels can permute a dense weight in its own bytes.
bool can_permute(const at::Tensor& weight);

/// Returns whether the device's current stream captures a CUDA graph.
bool is_captured(at::Device device);

}  // namespace nhwc::cuda
