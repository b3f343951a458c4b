// Checks the arguments of the operators, with the same errors under every dispatch key.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <ostream>
#include <string>

namespace nhwc {

/// The weight that an error is about: an operator's only weight, or one of a list.
struct Argument {
  const char* op;
  size_t index = 0;
  size_t count = 1;
};
std::ostream& operator<<(std::ostream& out, const Argument& argument);

/// Returns shape, strides, dtype and device as text, for error messages.
std::string describe(const at::Tensor& tensor);

/// Raises unless `weight` is an ordinary strided tensor.
void check_strided(const Argument& argument, const at::Tensor& weight);

/// Raises unless the weight's storage has all of its bytes, which `untyped_storage().resize_(0)` releases.
void check_storage(const Argument& argument, const at::Tensor& weight);

/// Returns the requested format, or by default channels-last of the weight's rank.
///
/// Raises unless `weight` is a strided 4D or 5D tensor and the format is of its rank.
at::MemoryFormat resolve_memory_format(const Argument& argument, const at::Tensor& weight,
                                       std::optional<at::MemoryFormat> requested);

/// The format and dtype that a weight is converted to.
struct Target {
  at::MemoryFormat memory_format;
  at::ScalarType dtype;
};

/// Resolves the defaults. Raises for arguments that `convert_weight` rejects. Sizes and strides may be symbolic.
Target resolve_target(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format,
                      std::optional<at::ScalarType> dtype, const Argument& argument = {"nhwc::convert_weight"});

}  // namespace nhwc
