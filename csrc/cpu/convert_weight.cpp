#include "convert_weight.h"

#include <ATen/Dispatch.h>
#include <ATen/Dispatch_v2.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>

#include "../convert_weight.h"
#include "../memory_format.h"
#include "dispatch.h"
#include "pages.h"
#include "torch_nhwc/filter_transpose.h"

namespace nhwc::cpu {
namespace {

int log2_of(int64_t element_size) {
  const int log2 = std::countr_zero(static_cast<uint64_t>(element_size));
  TORCH_INTERNAL_ASSERT(int64_t{1} << log2 == element_size && log2 < 5, "an element of ", element_size, " bytes");
  return log2;
}

// PyTorch's conversion between floating types, which goes through float whenever a narrow type takes part.
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

}  // namespace

void Conversions::add(const Filters& filters) {
  weights_.push_back(filters);
  ends_.push_back(bytes() + filters.count * filters.source_bytes);
}

void Conversions::add_write(const at::Tensor& weight, const at::Tensor& out) {
  if (weight.numel() == 0) return;
  const FilterOrder from = filter_order(weight), to = filter_order(out);
  if (from == FilterOrder::neither || to == FilterOrder::neither) return copy_any_strides(weight, out);
  const auto [count, rows, columns] = matrices_of(weight, from, to);
  const int64_t size = rows * columns;
  add({find_kernel(weight, out), nullptr, static_cast<const char*>(weight.const_data_ptr()),
       static_cast<char*>(out.mutable_data_ptr()), count, rows, columns, size * weight.element_size(),
       size * out.element_size(), size > 1 && is_worth_streaming(weight, out)});
}

void Conversions::add_permutation(const at::Tensor& weight) {
  const FilterOrder from = filter_order(weight);
  const auto [count, rows, columns] = matrices_of(weight, from, other_order(from));
  const int64_t filter_bytes = rows * columns * weight.element_size();
  auto* data = static_cast<char*>(weight.mutable_data_ptr());
  add({nullptr, filter_kernels().transpose_in_place[log2_of(weight.element_size())], data, data, count, rows, columns,
       filter_bytes, filter_bytes, false});
  largest_permuted_filter_ = std::max(largest_permuted_filter_, filter_bytes);
}

void Conversions::allocate() { scratch_ = at::empty({at::get_num_threads() * largest_permuted_filter_}, at::kByte); }

void Conversions::run() const {
  constexpr int64_t bytes_worth_a_thread = 1 << 20;
  at::parallel_for(0, bytes(), bytes_worth_a_thread, [this](int64_t begin, int64_t end) {
    for (size_t i = std::upper_bound(ends_.begin(), ends_.end(), begin) - ends_.begin(); i < weights_.size(); ++i) {
      const Filters& filters = weights_[i];
      const int64_t start = i == 0 ? 0 : ends_[i - 1];
      if (start >= end) break;
      // A filter belongs to the range that its first byte lies in.
      const int64_t size = filters.source_bytes;
      const int64_t first = (std::max(begin - start, int64_t{0}) + size - 1) / size;
      const int64_t count = std::min(filters.count, (end - start + size - 1) / size) - first;
      if (count <= 0) continue;
      char* destination = filters.destination + first * filters.destination_bytes;
      if (filters.transpose_in_place) {
        char* scratch =
            static_cast<char*>(scratch_.mutable_data_ptr()) + at::get_thread_num() * largest_permuted_filter_;
        filters.transpose_in_place(destination, scratch, count, filters.rows, filters.columns);
      } else {
        filters.transpose(filters.source + first * size, destination, count, filters.rows, filters.columns,
                          filters.non_temporal);
      }
    }
  });
}

}  // namespace nhwc::cpu
