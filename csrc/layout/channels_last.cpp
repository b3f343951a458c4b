#include "layout/channels_last.h"

#include <ATen/ATen.h>

namespace nhwc {
namespace {

/// Calls a function with the sizes and strides: as plain numbers where none is a symbol, since each comparison of
/// `SymInt`s is a call, and every operator asks some of these questions.
template <typename Function>
auto with_sizes_and_strides(const at::Tensor& input, const Function& function) {
  if (input.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return function(input.sym_sizes(), input.sym_strides());
  }
  return function(input.sizes(), input.strides());
}

/// Returns the canonical strides of channels-last. Sizes may be symbolic.
template <typename Size>
c10::SmallVector<Size, at::kDimVectorStaticSize> canonical_strides(c10::ArrayRef<Size> sizes) {
  c10::SmallVector<Size, at::kDimVectorStaticSize> strides(sizes.size());
  Size stride = 1;
  strides[1] = stride;
  stride *= sizes[1];
  for (size_t dim = sizes.size() - 1; dim >= 2; --dim) {
    strides[dim] = stride;
    stride *= sizes[dim];
  }
  strides[0] = stride;
  return strides;
}

/// Returns whether dimensions of size greater than 1 are in the order of channels-last, possibly with gaps.
template <typename Size>
bool is_ordered_channels_last(c10::ArrayRef<Size> sizes, c10::ArrayRef<Size> strides) {
  Size least = 0;
  for (size_t step = 0; step < sizes.size(); ++step) {  // channels, the spatial dimensions from the last one, samples
    const size_t dim = step == 0 ? 1 : step == sizes.size() - 1 ? 0 : sizes.size() - step;
    if (step == 0 && strides[dim] != 1) return false;
    if (sizes[dim] == 1) continue;
    if (strides[dim] < least) return false;
    least = strides[dim] * sizes[dim];
    if (strides[dim] == 0) return false;
  }
  return true;
}

}  // namespace

bool is_channels_last(const at::Tensor& input) {
  if (input.dim() < 3 || input.dim() > 5 || input.layout() != at::kStrided || input.is_nested()) return false;
  if (input.sym_numel() == 0) return false;
  return with_sizes_and_strides(input, [&]<typename Size>(c10::ArrayRef<Size> sizes, c10::ArrayRef<Size> strides) {
    if (!is_ordered_channels_last(sizes, strides)) return false;
    if (!input.is_contiguous()) return true;
    // Ambiguous: contiguous strides take precedence, as in PyTorch.
    if (strides != c10::ArrayRef<Size>(canonical_strides(sizes))) return false;
    Size contiguous = 1;
    for (size_t dim = sizes.size(); dim-- > 0; contiguous *= sizes[dim]) {
      if (strides[dim] != contiguous) return true;
    }
    return false;
  });
}

bool has_channels_last_strides(const at::Tensor& input) {
  if (input.dim() < 2) return false;
  return with_sizes_and_strides(input, []<typename Size>(c10::ArrayRef<Size> sizes, c10::ArrayRef<Size> strides) {
    return strides == c10::ArrayRef<Size>(canonical_strides(sizes));
  });
}

bool has_odd_strides(const at::Tensor& input) {
  if (input.dim() < 3 || input.sym_numel() == 0) return false;  // an empty one has strides that nothing is found by
  const bool is_in_order = is_channels_last(input);
  return with_sizes_and_strides(input, [&]<typename Size>(c10::ArrayRef<Size> sizes, c10::ArrayRef<Size> strides) {
    const auto channels_last = canonical_strides(sizes);
    bool is_odd = false;
    Size contiguous = 1;
    for (size_t dim = sizes.size(); dim-- > 0; contiguous *= sizes[dim]) {
      if (strides[dim] == (is_in_order ? channels_last[dim] : contiguous)) continue;
      if (sizes[dim] != 1) return false;
      is_odd = true;
    }
    return is_odd;
  });
}

at::Tensor empty_channels_last(const at::Tensor& like, std::optional<at::ScalarType> type) {
  const auto options = like.options().dtype(type.value_or(like.scalar_type()));
  return at::empty_strided_symint(like.sym_sizes(), canonical_strides(like.sym_sizes()), options);
}

}  // namespace nhwc
