// A convolution to compute: PyTorch's arguments, and what follows from its sizes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/native/ConvUtils.h>
#include <c10/core/SymInt.h>
#include <c10/util/SmallVector.h>

#include <optional>

namespace nhwc {

using OptionalTensor = std::optional<at::Tensor>;

/// Returns the sizes of an argument, of which PyTorch takes one for all axes.
at::SymDimVector for_each_axis(at::SymIntArrayRef sizes, size_t axes);

c10::SymInt quotient_rounded_up(const c10::SymInt& number, const c10::SymInt& divisor);

/// Returns whether a backend is oneDNN, or nothing has to be computed.
bool is_onednns(at::native::ConvBackend backend);

struct Way;  // a row of the table, see choice.h

/// A convolution along one axis of its kernel. For a transposed one, `size` is the output's and `positions` the
/// input's.
struct Axis {
  c10::SymInt size;
  c10::SymInt stride;
  c10::SymInt padding;
  c10::SymInt reach;  // from the kernel's first tap to its last
  c10::SymInt positions;

  /// Returns whether some position of the kernel has all taps inside, none in the padding.
  bool sees_whole_kernel() const;
};

/// The arguments of a convolution; of sizes, one for each axis of the kernel.
struct Call {
  at::Tensor input;
  at::Tensor weight;
  OptionalTensor bias;
  at::SymDimVector stride;
  at::SymDimVector padding;
  at::SymDimVector dilation;
  c10::SymInt groups;
  at::SymDimVector output_padding;  // zeros unless transposed
  bool is_transposed = false;
  bool is_compiled = false;  // where our kernels are calls of opaque operators
  /// Whether only PyTorch's operators may compute it: others observe, transform or differentiate them.
  bool is_composed = false;
  c10::SmallVector<const Way*, 4> rewritten_by = {};  // none of which may do so twice

  size_t axes() const { return stride.size(); }
  bool is_depthwise() const { return groups > 1 && weight.sym_size(1) == 1; }
  bool has_bias() const { return bias && bias->defined(); }

  /// Describes an axis of a convolution whose sizes fit each other. Axes are counted from the last one: 1, 2, 3.
  Axis axis(int64_t from_last) const;

  /// Returns whether all tensors are strided and on the CPU, which the library's ways are for.
  bool is_on_cpu() const;

  /// Returns whether the input is channels-last and has a dimension of samples.
  bool has_channels_last_input() const;

  bool has_channels_last_weight() const;

  /// Returns whether a gradient of the input, or of the weight, may be to come. For a tensor that torch.func has
  /// wrapped, another level of its transforms may require one.
  bool may_derive_by_input() const;
  bool may_derive_by_weight() const;

  /// Returns whether all tensors have one dtype.
  bool has_one_dtype() const;

  /// Returns whether the input has a dtype of half precision, bfloat16 or half.
  bool is_half() const { return input.scalar_type() == at::kBFloat16 || input.scalar_type() == at::kHalf; }

  /// Returns whether a graph is traced for any sizes.
  bool has_symbolic_sizes() const;

  /// Returns whether PyTorch accepts the sizes, and there are channels. What it does not is for its own operator to
  /// refuse.
  bool is_accepted() const;

  /// Returns whether every position misses a part of the kernel along some axis. Without padding none does.
  bool misses_kernel() const;

  /// Returns whether along some axis all taps of all positions are in the padding.
  bool misses_input() const;

  /// Returns what PyTorch computes it by.
  at::native::ConvBackend backend() const;

  /// Returns PyTorch's result.
  at::Tensor pytorchs() const;
};

}  // namespace nhwc
