#include "convert_weight.h"

#include <ATen/Dispatch.h>
#include <ATen/Dispatch_v2.h>
#include <ATen/Parallel.h>

#include "../memory_format.h"
#include "torch_nhwc/filter_transpose.h"

namespace nhwc::cpu {
namespace {

// A weight as the filter transpose sees it.
struct Filters {
  int64_t count, rows, columns;
  int64_t size() const { return rows * columns; }
};

Filters filters_of(const at::Tensor& weight, FilterOrder order) {
  const int64_t channels = weight.size(1);
  const int64_t taps = weight.numel() == 0 ? 0 : weight.numel() / (weight.size(0) * channels);
  return order == FilterOrder::channels_last ? Filters{weight.size(0), taps, channels}
                                             : Filters{weight.size(0), channels, taps};
}

// Runs `body(first filter, number of filters)` over the filters, split among threads once the work is worth it.
template <typename Body>
void for_filters(const Filters& filters, int64_t element_size, const Body& body) {
  constexpr int64_t bytes_worth_a_thread = 1 << 18;
  const int64_t grain =
      std::max<int64_t>(1, bytes_worth_a_thread / std::max<int64_t>(1, filters.size() * element_size));
  at::parallel_for(0, filters.count, grain, [&](int64_t begin, int64_t end) { body(begin, end - begin); });
}

// Not aligned to its size: complex tensors are aligned to their parts alone.
struct Element16 {
  uint64_t halves[2];
};

// Calls `body` with a value of the unsigned type that has the size of one element.
template <typename Body>
void with_element_type(int64_t element_size, const Body& body) {
  switch (element_size) {
    case 1: return body(uint8_t{});
    case 2: return body(uint16_t{});
    case 4: return body(uint32_t{});
    case 8: return body(uint64_t{});
    case 16: return body(Element16{});
    default: TORCH_INTERNAL_ASSERT(false, "an element of ", element_size, " bytes");
  }
}

// PyTorch's conversion between floating types, which goes through float whenever a narrow type takes part.
template <typename To>
struct CastLikeTorch {
  template <typename From>
  To operator()(From value) const {
    return static_cast<To>(static_cast<float>(value));
  }
};

#define NHWC_FLOATING_TYPES                                                                                           \
  AT_EXPAND(AT_FLOATING_TYPES), at::kHalf, at::kBFloat16, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e4m3fnuz, \
      at::kFloat8_e5m2fnuz, at::kFloat8_e8m0fnu

void write_and_cast(const at::Tensor& weight, const at::Tensor& out, const Filters& filters) {
  AT_DISPATCH_V2(weight.scalar_type(), "nhwc::convert_weight", AT_WRAP([&] {
                   using From = scalar_t;
                   const auto* source = weight.const_data_ptr<From>();
                   AT_DISPATCH_V2(out.scalar_type(), "nhwc::convert_weight", AT_WRAP([&] {
                                    auto* destination = out.mutable_data_ptr<scalar_t>();
                                    for_filters(filters, sizeof(From), [&](int64_t first, int64_t count) {
                                      const int64_t offset = first * filters.size();
                                      filter_transpose(source + offset, destination + offset, count, filters.rows,
                                                       filters.columns, CastLikeTorch<scalar_t>{});
                                    });
                                  }),
                                  NHWC_FLOATING_TYPES);
                 }),
                 NHWC_FLOATING_TYPES);
}

void write_bytes(const at::Tensor& weight, const at::Tensor& out, const Filters& filters) {
  with_element_type(weight.element_size(), [&](auto element) {
    using Element = decltype(element);
    const auto* source = static_cast<const Element*>(weight.const_data_ptr());
    auto* destination = static_cast<Element*>(out.mutable_data_ptr());
    for_filters(filters, sizeof(Element), [&](int64_t first, int64_t count) {
      const int64_t offset = first * filters.size();
      filter_transpose(source + offset, destination + offset, count, filters.rows, filters.columns);
    });
  });
}

// PyTorch's copy has no kernel for some dtypes, such as those of less than a byte; as integers their elements move too.
void copy_any_strides(const at::Tensor& weight, const at::Tensor& out) {
  constexpr std::pair<int64_t, at::ScalarType> integers[] = {
      {1, at::kByte}, {2, at::kShort}, {4, at::kInt}, {8, at::kLong}, {16, at::kComplexDouble}};
  if (weight.scalar_type() != out.scalar_type()) {
    out.copy_(weight);
    return;
  }
  for (const auto& [size, integer] : integers) {
    if (size == weight.element_size()) out.view(integer).copy_(weight.view(integer));
  }
}

}  // namespace

void write_weight(const at::Tensor& weight, const at::Tensor& out) {
  const FilterOrder from = filter_order(weight);
  const FilterOrder to = filter_order(out);
  if (from == FilterOrder::neither) {
    copy_any_strides(weight, out);
    return;
  }
  Filters filters = filters_of(weight, from);
  const bool moves = from != to && from != FilterOrder::either && to != FilterOrder::either;
  if (!moves) filters = {filters.count, 1, filters.size()};
  if (weight.scalar_type() == out.scalar_type()) {
    write_bytes(weight, out, filters);
  } else {
    write_and_cast(weight, out, filters);
  }
}

int64_t permute_scratch_bytes(const at::Tensor& weight) {
  return at::get_num_threads() * filters_of(weight, filter_order(weight)).size() * weight.element_size();
}

void permute_weight(const at::Tensor& weight, void* scratch) {
  const Filters filters = filters_of(weight, filter_order(weight));
  with_element_type(weight.element_size(), [&](auto element) {
    using Element = decltype(element);
    auto* data = static_cast<Element*>(weight.mutable_data_ptr());
    for_filters(filters, sizeof(Element), [&](int64_t first, int64_t count) {
      filter_transpose_in_place(data + first * filters.size(),
                                static_cast<Element*>(scratch) + at::get_thread_num() * filters.size(), count,
                                filters.rows, filters.columns);
    });
  });
}

}  // namespace nhwc::cpu
