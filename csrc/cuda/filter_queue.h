// Weights on CUDA devices. Whatever the number of weights, their filters are one list a device, and one kernel takes as
// many of them as its arguments hold.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "torch_nhwc/cuda/launch.h"

namespace nhwc::cuda {

/// CUDA weights to write or to permute, queued and then run together, on the current stream of every weight's device.
/// The caller keeps them. A library that is built without CUDA serves none: no_cuda/filter_queue.cpp.
class FilterQueue {
 public:
  /// The values of `weight` will go to `out`, as `WeightQueue` has it. False where no kernel serves.
  bool add_write(const at::Tensor& weight, const at::Tensor& out);

  /// The bytes of a weight whose filters are channels-first or channels-last will be permuted to the other order.
  void add_permutation(const at::Tensor& weight);

  /// Plans the launches, allocates their scratch memory, and asks the devices for what they need.
  void allocate();

  /// Launches. Raises only if a device fails.
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

/// Whether the kernels can permute a dense weight in its own bytes.
bool can_permute(const at::Tensor& weight);

/// Whether the device's current stream records a CUDA graph.
bool is_captured(at::Device device);

}  // namespace nhwc::cuda
