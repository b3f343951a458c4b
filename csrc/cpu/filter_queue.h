// Weights on the CPU. Whatever the number of weights, their filters are one list that is split among threads by bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "cpu/filter_kernels.h"

namespace nhwc::cpu {

/// CPU weights to write or to permute, queued and then run together, in one parallel region. The caller keeps them.
class FilterQueue {
 public:
  /// The values of `weight` will go to `out`, as `WeightQueue` has it. False where no kernel serves: the filters of one
  /// of the two lie in neither order.
  bool add_write(const at::Tensor& weight, const at::Tensor& out);

  /// The bytes of a weight whose filters are channels-first or channels-last will be permuted to the other order, each
  /// filter in its own bytes. The strides are not touched.
  void add_permutation(const at::Tensor& weight);

  /// Allocates what `run` needs: room for the largest filter that is permuted, for each thread.
  void allocate();

  /// Neither allocates nor throws.
  void run() const;

 private:
  // One weight, as the kernels see it: `filters` matrices. For a permutation the destination is the source.
  struct Entry {
    FilterKernels::Transpose transpose;
    FilterKernels::TransposeInPlace transpose_in_place;
    const char* source;
    char* destination;
    int64_t filters, rows, columns, source_bytes, destination_bytes;  // bytes of one filter
    bool is_beyond_caches;
  };
  void add(const Entry& entry);

  // One weight by itself needs no memory for its entry.
  c10::SmallVector<Entry, 1> entries_;
  c10::SmallVector<int64_t, 1> ends_;  // the running totals of the bytes that are read
  int64_t scratch_bytes_ = 0;          // of one thread
  at::Tensor scratch_;
};

}  // namespace nhwc::cpu
