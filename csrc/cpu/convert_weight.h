// Weights on the CPU. Whatever the number of weights, their filters are one list that is split among threads by bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "../convert_weight.h"
#include "filter_kernels.h"

namespace nhwc::cpu {

/// `nhwc::write_weights` for CPU tensors, in one parallel region.
void write_weights(const std::vector<Write>& writes);

/// The permutation of weights whose filters are channels-first or channels-last to the other order, each in its own
/// bytes and in one parallel region. The strides are not touched.
class Permutations {
 public:
  void add(const at::Tensor& weight);

  /// Allocates what `run` needs: room for the largest filter, for each thread.
  void allocate();

  /// Neither allocates nor throws.
  void run() const;

 private:
  struct Filters {
    FilterKernels::TransposeInPlace transpose;
    char* data;
    int64_t count, rows, columns, bytes;  // bytes of one filter
  };
  std::vector<Filters> weights_;
  std::vector<int64_t> ends_;
  int64_t largest_filter_ = 0;
  at::Tensor scratch_;
};

}  // namespace nhwc::cpu
