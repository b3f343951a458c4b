// Weights on the CPU.
#pragma once

#include <ATen/core/Tensor.h>

namespace nhwc::cpu {

/// `nhwc::write_weight` for CPU tensors.
void write_weight(const at::Tensor& weight, const at::Tensor& out);

/// Bytes of scratch that `permute_weight` needs, for every thread it may use.
int64_t permute_scratch_bytes(const at::Tensor& weight);

/// Permutes the bytes of a weight whose filters are channels-first or channels-last to the other order. The strides
/// are not touched. Neither allocates nor throws.
///
/// @param scratch  `permute_scratch_bytes(weight)` bytes, aligned for the weight's elements.
void permute_weight(const at::Tensor& weight, void* scratch);

}  // namespace nhwc::cpu
