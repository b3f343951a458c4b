// A call of a norm: what it computes, and what it takes.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <array>

#include "cpu/group_norm.h"
#include "cuda/norms.h"
#include "layout/channels_last.h"

namespace nhwc {

using Optional = std::optional<at::Tensor>;
inline const Optional none;

/// Returns the tensor, without a copy, or an undefined one.
inline const at::Tensor& value_of(const Optional& tensor) {
  static const at::Tensor undefined;
  return tensor ? *tensor : undefined;
}
inline Optional optional_of(const at::Tensor& tensor) { return tensor.defined() ? Optional(tensor) : std::nullopt; }

/// A call of a norm. Group norm and instance norm have statistics of each sample's groups. Batch norm is group norm of
/// all samples as a single one, with a group for each channel. The tensors are the caller's.
struct Norm {
  const char* name;
  const at::Tensor &input, &weight, &bias, &running_mean, &running_var;
  bool is_batch_norm;
  int64_t groups;    // of group norm
  bool is_of_input;  // or of the running statistics
  double eps;
  bool has_variance;  // among the results

  Norm(const char* name, const at::Tensor& input, const Optional& weight, const Optional& bias,
       const Optional& running_mean, const Optional& running_var, bool is_batch_norm, int64_t groups, bool is_of_input,
       double eps, bool has_variance = false)
      : name(name),
        input(input),
        weight(value_of(weight)),
        bias(value_of(bias)),
        running_mean(value_of(running_mean)),
        running_var(value_of(running_var)),
        is_batch_norm(is_batch_norm),
        groups(groups),
        is_of_input(is_of_input),
        eps(eps),
        has_variance(has_variance) {}

  c10::SymInt channels() const { return input.sym_size(1); }
  at::ScalarType type() const { return input.scalar_type(); }
  at::ScalarType type_of_statistics() const { return type() == at::kDouble ? at::kDouble : at::kFloat; }
  at::ScalarType type_of_parameters() const {
    return (weight.defined() ? weight : bias.defined() ? bias : input).scalar_type();
  }

  /// The sizes of grouped values: samples, rows, groups, and channels of a group.
  std::array<c10::SymInt, 4> grouped_sizes() const {
    if (is_batch_norm) return {1, -1, channels(), 1};
    return {input.sym_size(0), -1, groups, channels() / groups};
  }
  at::SymDimVector sizes_of_statistics() const {
    if (is_batch_norm) return {channels()};
    return {input.sym_size(0), groups};
  }
  cpu::GroupNormShape shape() const {
    const int64_t samples = is_batch_norm ? 1 : input.size(0), width = input.size(1);
    return {samples, input.numel() / (samples * width), width, is_batch_norm ? width : groups};
  }

  bool has_known_type() const {
    return type() == at::kFloat || type() == at::kBFloat16 || type() == at::kHalf || type() == at::kDouble;
  }
  bool has_groups() const { return is_batch_norm || (groups > 0 && channels() % groups == 0); }
  bool has_statistics() const {
    return running_mean.defined() == running_var.defined() && (is_of_input || running_mean.defined());
  }
  std::array<const at::Tensor*, 4> of_channels() const { return {&weight, &bias, &running_mean, &running_var}; }

  bool is_on_one_device() const {
    const auto all = of_channels();
    return std::all_of(all.begin(), all.end(),
                       [&](const at::Tensor* each) { return !each->defined() || each->device() == input.device(); });
  }
  bool is_on_cpu() const { return input.is_cpu() && is_on_one_device(); }

  /// Returns the first tensor that has not a number for each channel.
  const at::Tensor* find_missized() const {
    for (const at::Tensor* each : of_channels()) {
      if (each->defined() && (each->dim() != 1 || each->sym_size(0) != channels())) return each;
    }
    return nullptr;
  }
  /// Returns whether all have the dtype of the input, or all have float32 for an input of half or bfloat16. Running
  /// statistics of instance norm may both have any, since it converts its averages.
  bool are_cast() const {
    const bool has_both = running_mean.defined() && running_var.defined();
    if (has_both && running_mean.scalar_type() != running_var.scalar_type()) return false;
    bool is_same = true, is_mixed = type() == at::kHalf || type() == at::kBFloat16;
    for (const at::Tensor* each : of_channels()) {
      if (!each->defined() || (!is_batch_norm && (each == &running_mean || each == &running_var))) continue;
      is_same &= each->scalar_type() == type();
      is_mixed &= each->scalar_type() == at::kFloat;
    }
    return is_same || is_mixed;
  }

  /// Returns whether the kernels compute this. PyTorch's own operator handles everything else, errors included.
  bool is_served() const {
    return has_known_type() && is_channels_last(input) && has_groups() && has_statistics() && is_on_one_device() &&
           !find_missized() && are_cast();
  }

  /// Raises an error for what the kernels cannot compute, before they read anything.
  void check() const {
    TORCH_CHECK(input.dim() >= (is_batch_norm ? 4 : 3) && input.dim() <= 5, name, ": expected an input of ",
                is_batch_norm ? "4 or 5" : "3 to 5", " dimensions, got ", input.dim());
    TORCH_CHECK(has_known_type(), name, ": expected an input of float, double, half or bfloat16, got ", type());
    TORCH_CHECK(has_groups(), name, ": expected a number of groups that divides the ", channels(), " channels, got ",
                groups);
    TORCH_CHECK(input.sym_numel() > 0, name, ": expected an input with elements, got one of shape ", input.sym_sizes());
    TORCH_CHECK(is_on_one_device(), name, ": expected a weight, a bias and running statistics on ", input.device());
    const at::Tensor* missized = find_missized();
    TORCH_CHECK(!missized, name, ": expected a weight, a bias and running statistics of ", channels(),
                " elements, got one of shape ", missized->sym_sizes());
    TORCH_CHECK(are_cast(), name, ": expected a weight, a bias and running statistics of ", type(),
                ", or all of float for an input of half or bfloat16");
  }

  /// Raises the same errors for the forward, which takes running statistics as well.
  void check_forward() const {
    check();
    TORCH_CHECK(has_statistics(), name, ": expected both running statistics, or in training none");
  }

  void check_backward(const at::Tensor& grad, const at::Tensor& mean, const at::Tensor& rstd) const {
    check();
    const auto expect = [&](const char* what, const at::Tensor& given, at::SymIntArrayRef sizes, at::ScalarType type) {
      TORCH_CHECK(given.sym_sizes() == sizes && given.scalar_type() == type && given.device() == input.device(), name,
                  "_backward: expected ", what, " of ", type, " and of shape ", sizes, " on ", input.device(),
                  ", got one of ", given.scalar_type(), ", of shape ", given.sym_sizes(), " and strides ",
                  given.sym_strides(), " on ", given.device());
    };
    expect("a gradient", grad, input.sym_sizes(), type());
    const at::SymDimVector sizes = sizes_of_statistics();
    expect("a mean", mean, sizes, type_of_statistics());
    expect("a reciprocal deviation", rstd, sizes, type_of_statistics());
  }
};

inline Norm group_norm_of(const at::Tensor& input, int64_t groups, const Optional& weight, const Optional& bias,
                          double eps) {
  return Norm("nhwc::native_group_norm", input, weight, bias, none, none, false, groups, true, eps);
}

inline Norm instance_norm_of(const at::Tensor& input, const Optional& running_mean, const Optional& running_var,
                             const Optional& weight, const Optional& bias, bool use_input_stats, double eps) {
  const int64_t groups = input.dim() > 1 ? input.size(1) : 0;
  return Norm("nhwc::native_instance_norm", input, weight, bias, running_mean, running_var, false, groups,
              use_input_stats, eps, true);
}

inline Norm batch_norm_of(const at::Tensor& input, const Optional& running_mean, const Optional& running_var,
                          const Optional& weight, const Optional& bias, bool training, double eps) {
  return Norm("nhwc::native_batch_norm", input, weight, bias, running_mean, running_var, true, 0, training, eps);
}

/// Returns the norm for the kernels of a GPU, if they run there and gain, and all tensors are in its memory. The result
/// has the input's dtype, or is float. A bias, of a number for each channel, is added to the input.
std::optional<cuda::GroupNorm> find_cuda_norm(const Norm& norm, double momentum, bool is_float = false,
                                              const at::Tensor& input_bias = {});

/// Returns the factor from the biased to the unbiased variance of so many elements.
inline double unbiasing(int64_t elements) { return static_cast<double>(elements) / static_cast<double>(elements - 1); }

/// Updates a running statistic of batch norm as PyTorch does, in double and without incrementing its version.
inline void update(const at::Tensor& running, const at::Tensor& statistic, double momentum, double factor = 1) {
  const at::Tensor values = statistic.to(at::kDouble);
  const double* from = values.const_data_ptr<double>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, running.scalar_type(), "nhwc::native_batch_norm", [&] {
    auto to = running.accessor<scalar_t, 1>();
    for (int64_t c = 0; c < to.size(0); ++c) {
      to[c] = static_cast<scalar_t>(momentum * factor * from[c] + (1 - momentum) * static_cast<double>(to[c]));
    }
  });
}

}  // namespace nhwc
