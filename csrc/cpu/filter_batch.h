// Weights on the CPU. The filters of all weights are one list that is split among threads by bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "cpu/filter_kernels.h"

namespace nhwc::cpu {

/// CPU weights to write or to permute together, in one parallel region. The caller keeps them alive.
class FilterBatch {
 public:
  /// Adds a write of the values of `weight` to `out`, as in `WeightBatch`. Returns false where no kernel serves,
  /// because the filters of one of the two are in neither order.
  bool add_write(const at::Tensor& weight, const at::Tensor& out);

  /// Adds a permutation of a weight whose filters are channels-first or channels-last to the other order, each filter
  /// in its own bytes. The strides do not change.
  void add_permutation(const at::Tensor& weight);

  /// Allocates what `run` needs: room for the largest filter that is permuted, for each thread.
  void allocate();

  /// Runs the batch. Neither allocates nor throws.
  void run() const;

 private:
  // One weight in the form of the kernels: `filters` matrices. For a permutation the destination is the source.
  struct Entry {
    FilterKernels::Transpose transpose;
    FilterKernels::TransposeInPlace transpose_in_place;
    const char* source;
    char* destination;
    int64_t filters, rows, columns, source_bytes, destination_bytes;  // bytes of one filter
    bool is_beyond_caches;
  };
  void add(const Entry& entry);

  // A single weight needs no memory for its entry.
  c10::SmallVector<Entry, 1> entries_;
  c10::SmallVector<int64_t, 1> ends_;  // the running totals of the bytes that are read
  int64_t scratch_bytes_ = 0;          // of one thread
  at::Tensor scratch_;
};

}  // namespace nhwc::cpu
