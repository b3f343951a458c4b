// Finds tensors of a module that a conversion would separate from others over the same memory.
#pragma once

#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <unordered_set>
#include <vector>

namespace nhwc {
namespace module_detail {

using Identities = std::unordered_set<const at::TensorImpl*>;

// The memory from a tensor's first element to the end of its last one.
struct Span {
  const at::Tensor* tensor;
  const char* begin;
  const char* end;
};

inline bool has_memory(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !at::isTensorSubclassLike(tensor) &&
         tensor.numel() != 0 && tensor.storage().data() != nullptr;
}

inline Span span_of(const at::Tensor& tensor) {
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  return {&tensor, begin, begin + (last + 1) * static_cast<std::int64_t>(tensor.element_size())};
}

// Strides of dimensions of size 1 do not matter.
inline bool are_exact_aliases(const at::Tensor& one, const at::Tensor& other) {
  if (one.const_data_ptr() != other.const_data_ptr() || one.scalar_type() != other.scalar_type()) return false;
  if (one.sizes() != other.sizes()) return false;
  for (std::int64_t dim = 0; dim < one.dim(); ++dim) {
    if (one.size(dim) > 1 && one.stride(dim) != other.stride(dim)) return false;
  }
  return true;
}

// Returns the tensors whose memory overlaps that of another tensor which does not change with them, or which reads the
// memory in another way. The Python walk has the same function.
inline Identities tied_by_view(const std::vector<at::Tensor>& tensors, const Identities& changing) {
  std::vector<Span> spans;
  Identities seen;
  for (const at::Tensor& tensor : tensors) {
    if (has_memory(tensor) && seen.insert(tensor.unsafeGetTensorImpl()).second) spans.push_back(span_of(tensor));
  }
  std::sort(spans.begin(), spans.end(), [](const Span& one, const Span& other) { return one.begin < other.begin; });

  Identities tied;
  for (auto first = spans.begin(), last = first; first != spans.end(); first = last) {
    // A run of tensors that overlap, directly or through others.
    const char* end = first->end;
    for (++last; last != spans.end() && last->begin < end; ++last) end = std::max(end, last->end);
    const auto comes_apart = [&](const Span& span) {
      return !changing.count(span.tensor->unsafeGetTensorImpl()) || !are_exact_aliases(*span.tensor, *first->tensor);
    };
    if (last - first == 1 || std::none_of(first, last, comes_apart)) continue;
    for (auto span = first; span != last; ++span) tied.insert(span->tensor->unsafeGetTensorImpl());
  }
  return tied;
}

}  // namespace module_detail
}  // namespace nhwc
