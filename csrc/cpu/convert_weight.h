// Weights on the CPU. Whatever the number of weights, their filters are one list that is split among threads by bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "filter_kernels.h"

namespace nhwc::cpu {

/// Conversions of CPU weights, collected and then run together, in one parallel region.
class Conversions {
 public:
  /// The values of `weight` will go to `out`, as `nhwc::write_weights` has it. The caller keeps both alive. Where
  /// the filters of one of the two lie in neither order they go there at once, by PyTorch's own copy.
  void add_write(const at::Tensor& weight, const at::Tensor& out);

  /// The bytes of a weight whose filters are channels-first or channels-last will be permuted to the other order, each
  /// filter in its own bytes. The strides are not touched.
  void add_permutation(const at::Tensor& weight);

  /// The bytes that will be read.
  int64_t bytes() const { return ends_.empty() ? 0 : ends_.back(); }

  /// Allocates what `run` needs: room for the largest filter that is permuted, for each thread.
  void allocate();

  /// Neither allocates nor throws.
  void run() const;

 private:
  // One weight, as the kernels see it: `count` matrices. For a permutation the destination is the source.
  struct Filters {
    FilterKernels::Transpose transpose;
    FilterKernels::TransposeInPlace transpose_in_place;
    const char* source;
    char* destination;
    int64_t count, rows, columns, source_bytes, destination_bytes;  // bytes of one filter
    bool non_temporal;
  };
  void add(const Filters& filters);

  std::vector<Filters> weights_;
  std::vector<int64_t> ends_;  // the running totals of bytes
  int64_t largest_permuted_filter_ = 0;
  at::Tensor scratch_;
};

}  // namespace nhwc::cpu
