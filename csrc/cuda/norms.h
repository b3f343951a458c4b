// Group norm of channels-last activations on a CUDA device. A library that is built without CUDA has no kernels for it:
// no_cuda/norms.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "cpu/group_norm.h"

namespace nhwc::cuda {

/// Returns what `TORCH_NHWC_CUDA_NORMS` says, if it decides. Raises for other values than 0, 1 and measure.
inline std::optional<bool> norm_switch() {
  const char* set = std::getenv("TORCH_NHWC_CUDA_NORMS");
  const std::string_view choice = set ? set : "";
  TORCH_CHECK_VALUE(choice.empty() || choice == "0" || choice == "1" || choice == "measure",
                    "TORCH_NHWC_CUDA_NORMS: expected 1 (norms on a GPU run on this library's kernels), 0 (they do "
                    "not), measure (they do where they gain, measured in this process), or nothing (the same, measured "
                    "once), got '",
                    choice, "'");
  return choice == "0" || choice == "1" ? std::optional(choice == "1") : std::nullopt;
}

/// Norms of several channels in a group, of one, and batch norm: PyTorch computes each in another way.
enum class NormKind : std::uint8_t { group, instance, batch };
constexpr int kinds_of_norms = 3;

/// Says from how many bytes of an activation on the kernels gain on a device, for each kind; a negative number: never.
/// Nothing forgets what was said, and what is known of the architecture decides.
void set_norms(at::Device device, at::IntArrayRef least_bytes);

/// Returns whether anything was said.
bool is_measured(at::Device device);

/// Returns whether the kernels run on a device for norms of a kind and a size: as the switch says, as was measured, or
/// on architectures on which they were.
bool runs_norm(at::Device device, NormKind kind, int64_t bytes);

/// The same for any kind and size.
bool runs_norms(at::Device device);

/// Returns why the library has no kernels that the device can run, or nothing.
std::string missing_image(at::Device device);

/// A norm of `samples` dense matrices of `rows` x channels. All tensors are on one device; parameters, running
/// statistics and gradients of parameters, which may be undefined, are dense and have one dtype. Batch norm has one
/// sample, and a group for each channel.
struct GroupNorm {
  int64_t samples, rows, groups;
  at::Tensor input;  ///< in channels-last
  at::ScalarType type_of_result;
  const at::Tensor &weight, &bias, &running_mean, &running_var;
  double momentum, eps;
  bool is_of_input;  ///< or of the running statistics
  /// Of a parameter's dtype, added to the input; may be undefined. `group_norm` takes none. With one, means and
  /// deviations are of each sample and channel, and the means are those without it.
  at::Tensor input_bias = {};
};

/// Returns whether the kernels compute a norm where they run: not one of more channels or blocks than they can have.
bool can_run(const GroupNorm& norm);

/// Writes the output and of each sample and group the mean, the reciprocal deviation and, where it is defined, the
/// variance, on the current stream, and updates running statistics.
void group_norm(const GroupNorm& norm, const at::Tensor& out, const at::Tensor& mean, const at::Tensor& rstd,
                const at::Tensor& variance);

/// The same but the output, and the statistics may be double.
void norm_statistics(const GroupNorm& norm, const at::Tensor& mean, const at::Tensor& rstd);

/// Writes activation(norm(input) + residual) by such statistics. The residual may be undefined.
void normalise(const GroupNorm& norm, const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& residual,
               const cpu::Activation& activation, const at::Tensor& out);

/// Writes the gradients that are defined.
void group_norm_backward(const GroupNorm& norm, const at::Tensor& grad, const at::Tensor& mean, const at::Tensor& rstd,
                         const at::Tensor& grad_input, const at::Tensor& grad_weight, const at::Tensor& grad_bias,
                         const cpu::Activation& activation = {});

}  // namespace nhwc::cuda
