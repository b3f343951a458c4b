#include "in_place/commit.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "cuda/filter_queue.h"
#include "weights/arguments.h"
#include "weights/sentences.h"
#include "writing/weight_queue.h"

namespace nhwc {
namespace {

// One tensor that changes: a weight or a gradient.
struct Change {
  at::Tensor tensor;
  Strides strides;
  Outcome outcome;
  at::Tensor replacement = {};  // what the tensor becomes by set_data
  at::Tensor staged = {};       // values on their way back into a reused storage

  // Dense strides of neither order cannot be permuted filter by filter: their values go through a whole copy.
  bool is_staged() const {
    return outcome == Outcome::reused &&
           (filter_order(tensor) == FilterOrder::neither || filter_order(replacement) == FilterOrder::neither);
  }
};

// Replays of a graph would permute the bytes again.
void check_no_capture(const char* op, const std::vector<Change>& changes) {
  std::optional<at::Device> asked;
  for (const Change& change : changes) {
    if (change.outcome == Outcome::restrided || change.tensor.device() == asked) continue;
    asked = change.tensor.device();
    TORCH_CHECK(!asked->is_cuda() || !cuda::is_captured(*asked), op,
                ": expected no CUDA graph to be captured: its replays would permute the bytes again; convert before "
                "the capture");
  }
}

// The changes that the plans amount to, each tensor once. Raises for the first refusal.
std::vector<Change> changes_of(const char* op, at::TensorList weights, const std::vector<WeightPlan>& plans) {
  std::vector<Change> changes;
  std::unordered_set<const at::TensorImpl*> seen;
  const auto add = [&](const at::Tensor& tensor, const Strides& strides, Outcome outcome) {
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second || outcome == Outcome::kept) return;
    changes.push_back({tensor, strides, outcome});
  };
  for (size_t index = 0; index < weights.size(); ++index) {
    const WeightPlan& plan = plans[index];
    TORCH_CHECK(!is_refusal(plan.outcome), Argument{op, index, weights.size()}, ": the weight ",
                refusal_of(plan.outcome), " (", describe(weights[index]), ")");
    add(weights[index], plan.strides, plan.outcome);
  }
  // A gradient that is in the list itself has strides of its own.
  for (size_t index = 0; index < weights.size(); ++index) {
    const WeightPlan& plan = plans[index];
    if (plan.gradient_outcome != Outcome::kept) add(weights[index].grad(), plan.strides, plan.gradient_outcome);
  }
  return changes;
}

// New tensors are normal tensors even in inference mode, or a converted parameter could never train again.
struct ReplacementGuard {
  explicit ReplacementGuard(const at::Tensor& tensor) : inference(tensor.is_inference()) {}
  c10::InferenceMode inference;
  at::NoGradGuard no_grad;
};

bool are_aliases(const at::Tensor& a, const at::Tensor& b) {
  return a.is_alias_of(b) && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
}

// What detach().as_strided(...) gives, without two ways through the dispatcher: models have thousands of tensors.
at::Tensor restrided(const at::Tensor& tensor, const Strides& strides) {
  auto copy = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0),
                                                                    /*allow_tensor_metadata_change=*/true);
  copy->set_sizes_and_strides(tensor.sizes(), strides);
  return at::Tensor(std::move(copy));
}

// Changes that are made together: their bytes, on the CPU in one parallel region, then their metadata.
struct Batch {
  at::Device device;
  std::vector<const Change*> changes = {};
  WeightQueue queue = {};
};

// All that is left to do, in this order: what is written to new memory of devices, then their batches, one for each
// device, then those of the CPU. Devices may fail. While new memory is written nothing is seen of that; later a device
// that fails takes its own weights with it, and every other weight is converted or as it was.
struct Commit {
  WeightQueue device_writes = {};
  std::vector<Batch> batches = {};
};

// New memory is address space alone until it is touched. Each batch takes the pages of its own new memory, and then
// gives the old memory of its weights back, before the next one begins: at its highest, memory in use is so many bytes,
// or one weight, above what it is before or after, whichever is more; and yet all of it was asked for beforehand, so
// that a lack of it changes nothing.
constexpr int64_t fresh_bytes_of_a_batch = 8 << 20;

// Makes every replacement, and everything that the commit needs. Tensors that are exact aliases of each other stay so:
// they share one.
Commit prepare(std::vector<Change>& changes) {
  std::unordered_map<const c10::StorageImpl*, std::vector<const Change*>> by_storage;
  Commit commit;
  int64_t fresh_bytes = 0;  // of the last batch of the CPU
  const auto batch_of = [&](const Change& change) -> Batch& {
    const at::Device device = change.tensor.device();
    const bool counts = device.is_cpu() && is_fresh(change.outcome);
    const int64_t bytes = counts ? change.tensor.numel() * change.tensor.element_size() : 0;
    const bool is_full = bytes > 0 && fresh_bytes > 0 && fresh_bytes + bytes > fresh_bytes_of_a_batch;
    fresh_bytes = is_full ? bytes : fresh_bytes + bytes;
    const auto last = std::find_if(commit.batches.rbegin(), commit.batches.rend(),
                                   [&](const Batch& batch) { return batch.device == device; });
    return last == commit.batches.rend() || is_full ? commit.batches.emplace_back(Batch{device}) : *last;
  };
  for (Change& change : changes) {
    const at::Tensor& tensor = change.tensor;
    Batch& batch = batch_of(change);
    batch.changes.push_back(&change);
    const ReplacementGuard guard(tensor);
    const auto write = [&](const at::Tensor& out) {
      const at::NoGradGuard no_grad;
      (tensor.is_cpu() ? batch.queue : commit.device_writes).write_or_queue(tensor, out);
    };
    if (is_fresh(change.outcome)) {
      // Aliases hold their storage together.
      if (tensor.storage().use_count() > 1) {
        auto& neighbours = by_storage[tensor.storage().unsafeGetStorageImpl()];
        const auto alias = std::find_if(neighbours.begin(), neighbours.end(),
                                        [&](const Change* other) { return are_aliases(tensor, other->tensor); });
        if (alias != neighbours.end()) {
          change.replacement = (*alias)->replacement.detach();
          continue;
        }
        neighbours.push_back(&change);
      }
      // To ask takes as long as the rest: what is merely held is in the allocator's own memory, which is not pinned.
      const bool may_be_pinned = tensor.is_cpu() && change.outcome != Outcome::fresh_held;
      const auto options = tensor.options().pinned_memory(may_be_pinned && tensor.is_pinned());
      change.replacement = at::empty_strided(tensor.sizes(), change.strides, options);
      write(change.replacement);
    } else {
      change.replacement = restrided(tensor, change.strides);
    }
    if (change.is_staged()) {
      change.staged = at::empty_strided(tensor.sizes(), change.strides, tensor.options());
      write(change.staged);
    } else if (change.outcome == Outcome::reused) {
      batch.queue.add_permutation(tensor);
    }
  }
  commit.device_writes.allocate();
  for (Batch& batch : commit.batches) batch.queue.allocate();
  return commit;
}

// The staged values into the storage that they came from.
void write_back(const Change& change) {
  if (change.tensor.is_cpu()) {
    std::memcpy(change.tensor.mutable_data_ptr(), change.staged.const_data_ptr(), change.tensor.nbytes());
  } else {
    const ReplacementGuard guard(change.tensor);
    at::Tensor(change.replacement).copy_(change.staged);
  }
}

// The old memory of a weight may still be read, on a stream that is not the one that it was allocated on: it is given
// back, but not handed out again before that is done.
void outlive_reads(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return;
  const c10::impl::VirtualGuardImpl guard(tensor.device().type());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), guard.getStream(tensor.device()));
}

// Writes and permutes the bytes, and swaps the replacements in.
void run(const Batch& batch) {
  batch.queue.run();
  for (const Change* change : batch.changes) {
    if (change->staged.defined()) write_back(*change);
    if (is_fresh(change->outcome)) outlive_reads(change->tensor);
    at::Tensor(change->tensor).set_data(change->replacement);
  }
}

void run(const Commit& commit) {
  commit.device_writes.run();
  for (const bool is_cpu : {false, true}) {
    for (const Batch& batch : commit.batches) {
      if (batch.device.is_cpu() == is_cpu) run(batch);
    }
  }
}

}  // namespace

void commit(const char* op, at::TensorList weights, const std::vector<WeightPlan>& plans) {
  std::vector<Change> changes = changes_of(op, weights, plans);
  if (changes.empty()) return;
  check_no_capture(op, changes);
  run(prepare(changes));
  // Autocast keeps low-precision copies of weights; those of the old layout would serve until its region ends.
  at::autocast::clear_cache();
}

}  // namespace nhwc
