// Copies values into memory that is there already: what the functional operators do, less the allocation.
#include "ops/copy_weight_.h"

#include <ATen/MemoryOverlap.h>
#include <torch/library.h>

#include "weights/arguments.h"
#include "weights/memory_format.h"
#include "writing/weight_queue.h"

namespace nhwc {
namespace {

constexpr const char* op = "nhwc::copy_weight_";

std::string mismatch(const at::Tensor& self, const at::Tensor& weight) {
  return c10::str(op, ": expected a tensor of the weight's shape and device, contiguous or channels-last, got ",
                  describe(self), " for the weight ", describe(weight));
}

void copy_weight_kernel_(const at::Tensor& self, const at::Tensor& weight) {
  check_copy(self, weight);
  TORCH_CHECK(in_format(self, at::MemoryFormat::Contiguous) || in_format(self, channels_last_of(self)),
              mismatch(self, weight));
  TORCH_CHECK(!self.is_neg() && !self.is_conj(), op, ": expected a tensor that is not a lazy view, got ",
              describe(self));
  check_storage({op}, self);
  check_storage({op}, weight);
  TORCH_CHECK(!self.is_alias_of(weight) || at::get_overlap_status(self, weight) == at::MemOverlapStatus::No, op,
              ": expected memory that does not overlap the weight's: use convert_weight_ for a conversion in place");
  const at::Tensor resolved = weight.resolve_conj().resolve_neg();
  WeightQueue queue;
  queue.write_or_queue(resolved, self);
  queue.allocate();
  queue.run();
}

}  // namespace

void check_copy(const at::Tensor& self, const at::Tensor& weight) {
  resolve_target(weight, std::nullopt, self.scalar_type(), {op});
  TORCH_CHECK(self.sym_sizes() == weight.sym_sizes() && self.device() == weight.device(), mismatch(self, weight));
}

TORCH_LIBRARY_IMPL(nhwc, CompositeExplicitAutograd, m) { m.impl("copy_weight_", TORCH_FN(copy_weight_kernel_)); }

}  // namespace nhwc
