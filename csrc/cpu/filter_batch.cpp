#include "cpu/filter_batch.h"

#include <ATen/Dispatch.h>
#include <ATen/Dispatch_v2.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>

#include "cpu/caches.h"
#include "cpu/dispatch.h"
#include "cpu/pages.h"
#include "layout/memory_format.h"
#include "torch_nhwc/filter_transpose.h"

namespace nhwc::cpu {
namespace {

int log2_of(int64_t element_size) {
  const int log2 = std::countr_zero(static_cast<uint64_t>(element_size));
  TORCH_INTERNAL_ASSERT(int64_t{1} << log2 == element_size && log2 < 5, "an element of ", element_size, " bytes");
  return log2;
}

// PyTorch's conversion between floating-point types, which goes through float if either type is narrow.
template <typename To>
struct CastLikeTorch {
  template <typename From>
  To operator()(From value) const {
    return static_cast<To>(static_cast<float>(value));
  }
};

template <typename From, typename To>
void transpose_and_cast(const void* source, void* destination, int64_t filters, int64_t rows, int64_t columns, bool) {
  const CastLikeTorch<To> cast;
  detail::transpose_by_loops(
      {static_cast<const char*>(source), static_cast<char*>(destination), filters, rows, columns, columns, rows, false},
      detail::Cast<From, To, CastLikeTorch<To>>{cast});
}

#define NHWC_FLOATING_TYPES                                                                                           \
  AT_EXPAND(AT_FLOATING_TYPES), at::kHalf, at::kBFloat16, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e4m3fnuz, \
      at::kFloat8_e5m2fnuz, at::kFloat8_e8m0fnu

FilterKernels::Transpose find_kernel(const at::Tensor& weight, const at::Tensor& out) {
  const FilterKernels& kernels = filter_kernels();
  const at::ScalarType from = weight.scalar_type(), to = out.scalar_type();
  if (from == to) return kernels.transpose[log2_of(weight.element_size())];
  if (from == at::kFloat && to == at::kBFloat16) return kernels.float_to_bfloat16;
  if (from == at::kFloat && to == at::kHalf) return kernels.float_to_half;
  if (from == at::kBFloat16 && to == at::kFloat) return kernels.bfloat16_to_float;
  if (from == at::kHalf && to == at::kFloat) return kernels.half_to_float;
  FilterKernels::Transpose found = nullptr;
  AT_DISPATCH_V2(from, "nhwc::convert_weight", AT_WRAP([&] {
                   using From = scalar_t;
                   AT_DISPATCH_V2(to, "nhwc::convert_weight",
                                  AT_WRAP([&] { found = transpose_and_cast<From, scalar_t>; }), NHWC_FLOATING_TYPES);
                 }),
                 NHWC_FLOATING_TYPES);
  return found;
}

// Returns whether a weight and its copy exceed half of the last level of cache, so that the copy would not stay there.
bool is_beyond_caches(const at::Tensor& weight, const at::Tensor& out) {
  return static_cast<int64_t>(weight.nbytes() + out.nbytes()) > last_level_cache_bytes() / 2;
}

}  // namespace

void FilterBatch::add(const Entry& entry) {
  ends_.push_back((ends_.empty() ? 0 : ends_.back()) + entry.filters * entry.source_bytes);
  entries_.push_back(entry);
}

bool FilterBatch::add_write(const at::Tensor& weight, const at::Tensor& out) {
  if (weight.numel() == 0) return true;
  const FilterOrder from = filter_order(weight), to = filter_order(out);
  if (from == FilterOrder::neither || to == FilterOrder::neither) return false;
  const auto [filters, rows, columns] = filter_shape(weight, from, to);
  const int64_t size = rows * columns;
  add({find_kernel(weight, out), nullptr, static_cast<const char*>(weight.const_data_ptr()),
       static_cast<char*>(out.mutable_data_ptr()), filters, rows, columns, size * weight.element_size(),
       size * out.element_size(), size > 1 && is_beyond_caches(weight, out)});
  return true;
}

void FilterBatch::add_permutation(const at::Tensor& weight) {
  const FilterOrder from = filter_order(weight);
  const auto [filters, rows, columns] = filter_shape(weight, from, other_order(from));
  const int64_t filter_bytes = rows * columns * weight.element_size();
  auto* data = static_cast<char*>(weight.mutable_data_ptr());
  add({nullptr, filter_kernels().transpose_in_place[log2_of(weight.element_size())], data, data, filters, rows, columns,
       filter_bytes, filter_bytes, false});
  // Smaller filters fit on the stack.
  if (filter_bytes > detail::buffer_bytes) scratch_bytes_ = std::max(scratch_bytes_, filter_bytes);
}

void FilterBatch::allocate() {
  if (scratch_bytes_ != 0) scratch_ = at::empty({at::get_num_threads() * scratch_bytes_}, at::kByte);
}

void FilterBatch::run() const {
  if (entries_.empty()) return;
  constexpr int64_t bytes_worth_a_thread = 1 << 20;
  for (const Entry& entry : entries_) {
    if (entry.transpose) request_huge_pages(entry.destination, entry.filters * entry.destination_bytes);
  }
  char* scratch = scratch_.defined() ? static_cast<char*>(scratch_.mutable_data_ptr()) : nullptr;
  at::parallel_for(0, ends_.back(), bytes_worth_a_thread, [this, scratch](int64_t begin, int64_t end) {
    for (size_t i = std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin(); i < entries_.size(); ++i) {
      const Entry& entry = entries_[i];
      const int64_t start = i == 0 ? 0 : ends_[i - 1];
      if (start >= end) break;
      // A filter belongs to the range that contains its first byte.
      const int64_t size = entry.source_bytes;
      const int64_t first = (std::max(begin - start, int64_t{0}) + size - 1) / size;
      const int64_t filters = std::min(entry.filters, (end - start + size - 1) / size) - first;
      if (filters <= 0) continue;
      char* destination = entry.destination + first * entry.destination_bytes;
      if (entry.transpose_in_place) {
        entry.transpose_in_place(destination, scratch + at::get_thread_num() * scratch_bytes_, filters, entry.rows,
                                 entry.columns);
      } else {
        // The system clears a new page, which loads it into the cache: non-temporal stores would gain nothing.
        const bool were_resident = prefault_pages(destination, filters * entry.destination_bytes);
        entry.transpose(entry.source + first * size, destination, filters, entry.rows, entry.columns,
                        entry.is_beyond_caches && were_resident);
      }
    }
  });
}

}  // namespace nhwc::cpu
