// Memory formats of weights: canonical strides, "in format", and how a weight's filters lie in memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <ostream>
#include <string>
#include <vector>

namespace nhwc {

/// The weight that an error is about: an operator's only one, or one of a list.
struct Argument {
  const char* op;
  size_t index = 0;
  size_t count = 1;
};
std::ostream& operator<<(std::ostream& out, const Argument& argument);

/// Raises unless `tensor` is an ordinary strided one.
void check_strided(const Argument& argument, const at::Tensor& tensor);

/// The format asked for: `requested`, or channels-last of the weight's rank.
///
/// Raises unless `weight` is a strided 4D or 5D tensor and the format is of its rank.
at::MemoryFormat resolve_memory_format(const Argument& argument, const at::Tensor& weight,
                                       std::optional<at::MemoryFormat> requested);

/// Raises unless the weight's storage has all of its bytes: `untyped_storage().resize_(0)` releases them.
void check_storage(const Argument& argument, const at::Tensor& weight);

using Strides = std::vector<int64_t>;

/// The strides that `at::empty(size, memory_format)` gives, also where a size is 0 or 1.
Strides canonical_strides(at::IntArrayRef size, at::MemoryFormat memory_format);

/// Whether the strides are exactly the canonical ones. `is_contiguous(memory_format)` is weaker: it overlooks the
/// strides of dimensions of size 1, by which PyTorch tells the format of an ambiguous tensor.
bool in_format(const at::Tensor& weight, at::MemoryFormat memory_format);

/// Whether no two elements lie at one place. Strict: strides that interleave without overlapping count as overlapping.
bool is_non_overlapping(at::IntArrayRef size, at::IntArrayRef strides);

/// channels_last or channels_last_3d, by rank.
at::MemoryFormat channels_last_of(const at::Tensor& weight);

/// How the filters of a weight lie in memory.
enum class FilterOrder {
  channels_first,  ///< each filter is a dense I x K matrix
  channels_last,   ///< each filter is a dense K x I matrix
  either,          ///< both at once: one tap, one channel, or nothing at all
  neither,         ///< any other strides
};
FilterOrder filter_order(const at::Tensor& weight);

/// channels_last for channels_first and the reverse.
inline FilterOrder other_order(FilterOrder order) {
  return order == FilterOrder::channels_last ? FilterOrder::channels_first : FilterOrder::channels_last;
}

/// A weight as the kernels see it: `filters` row-major matrices.
struct Matrices {
  int64_t filters, rows, columns;
};

/// The matrices that go from one order to the other; where nothing moves, elements one by one.
Matrices matrices_of(const at::Tensor& weight, FilterOrder from, FilterOrder to);

/// Shape, strides, dtype and device, for error messages.
std::string describe(const at::Tensor& tensor);

}  // namespace nhwc
