// Group norm of channels-last activations on a CUDA device. A library that is built without CUDA has no kernels for it:
// no_cuda/norms.cpp.
#pragma once

#include <ATen/core/Tensor.h>

namespace nhwc::cuda {

/// Returns whether the kernels run on a device: where `TORCH_NHWC_CUDA_NORMS` is 1, and unless it is 0 on architectures
/// on which they were measured. Raises for other values.
bool runs_norms(at::Device device);

/// A norm of `samples` dense matrices of `rows` x channels. All tensors are on one device, the parameters and their
/// gradients, which may be undefined, are dense and have one dtype.
struct GroupNorm {
  int64_t samples, rows, groups;
  const at::Tensor &input, &weight, &bias;  ///< in channels-last
  double eps;
};

/// Returns whether one launch can have as many blocks as the norm has.
bool can_run(const GroupNorm& norm);

/// Writes the output and of each sample and group the mean, the reciprocal deviation and, where it is defined, the
/// variance, on the current stream.
void group_norm(const GroupNorm& norm, const at::Tensor& out, const at::Tensor& mean, const at::Tensor& rstd,
                const at::Tensor& variance);

/// Writes the gradients that are defined.
void group_norm_backward(const GroupNorm& norm, const at::Tensor& grad, const at::Tensor& mean, const at::Tensor& rstd,
                         const at::Tensor& grad_input, const at::Tensor& grad_weight, const at::Tensor& grad_bias);

}  // namespace nhwc::cuda
