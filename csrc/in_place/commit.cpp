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
  at::Tensor replacement = {};   // what the tensor becomes by set_data
  at::Tensor staged = {};        // values on their way back into a reused storage
  const Change* twin = nullptr;  // an earlier change of an exact alias, whose new storage this one shares

  // New memory of the CPU is made in stages.
  bool is_of_a_stage() const { return tensor.is_cpu() && is_fresh(outcome); }

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
at::Tensor restrided(const at::Tensor& tensor, at::IntArrayRef strides) {
  auto copy = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0),
                                                                    /*allow_tensor_metadata_change=*/true);
  copy->set_sizes_and_strides(tensor.sizes(), strides);
  return at::Tensor(std::move(copy));
}

// Tensors that are exact aliases of each other stay so: they share one new storage.
void find_twins(std::vector<Change>& changes) {
  std::unordered_map<const c10::StorageImpl*, std::vector<const Change*>> by_storage;
  for (Change& change : changes) {
    const at::Tensor& tensor = change.tensor;
    // Aliases hold their storage together.
    if (!is_fresh(change.outcome) || tensor.storage().use_count() == 1) continue;
    auto& neighbours = by_storage[tensor.storage().unsafeGetStorageImpl()];
    const auto twin = std::find_if(neighbours.begin(), neighbours.end(),
                                   [&](const Change* other) { return are_aliases(tensor, other->tensor); });
    twin == neighbours.end() ? neighbours.push_back(&change) : void(change.twin = *twin);
  }
}

// Makes the new storage of a change; its values are to be written, at once or by the queue.
void replace(Change& change, WeightQueue& queue) {
  const at::Tensor& tensor = change.tensor;
  if (change.twin) {
    change.replacement = change.twin->replacement.detach();
    return;
  }
  // To ask takes as long as the rest: what is merely held is in the allocator's own memory, which is not pinned.
  const bool may_be_pinned = tensor.is_cpu() && change.outcome != Outcome::fresh_held;
  const auto options = tensor.options().pinned_memory(may_be_pinned && tensor.is_pinned());
  change.replacement = at::empty_strided(tensor.sizes(), change.strides, options);
  queue.write_or_queue(tensor, change.replacement);
}

// New memory on the CPU is made, written and swapped in by stages of so many bytes, or of one weight. Each gives the
// old memory of its weights back before the next one asks for its own, and so memory in use is at its highest a stage
// above what it is before or after, whichever is more.
constexpr int64_t bytes_of_a_stage = 8 << 20;

struct Stage {
  std::vector<Change*> changes = {};
  std::vector<at::Tensor> originals = {};  // what the tensors become again if a later stage fails
  WeightQueue undo = {};                   // what then brings the values of new storage into the old order
};

std::vector<Stage> stages_of(std::vector<Change>& changes) {
  std::vector<Stage> stages;
  int64_t bytes = bytes_of_a_stage;
  for (Change& change : changes) {
    if (!change.is_of_a_stage()) continue;
    const int64_t size = change.tensor.numel() * change.tensor.element_size();
    if (stages.empty() || bytes + size > bytes_of_a_stage) {
      stages.emplace_back();
      bytes = 0;
    }
    bytes += size;
    stages.back().changes.push_back(&change);
  }
  return stages;
}

// What a tensor becomes again if a later stage fails. Memory that others hold or share, or whose strides the new one
// cannot take, is kept for that. What would go with the tensor goes: its values return into the old order by a
// permutation within their new storage.
at::Tensor original_of(const Change& change, WeightQueue& undo) {
  const FilterOrder from = filter_order(change.tensor), to = filter_order(change.replacement);
  const bool is_kept = change.outcome == Outcome::fresh_shared || is_held(change.tensor) ||
                       from == FilterOrder::neither || to == FilterOrder::neither;
  if (is_kept) return restrided(change.tensor, change.tensor.strides());
  if (from != to && from != FilterOrder::either && to != FilterOrder::either) undo.add_permutation(change.replacement);
  return restrided(change.replacement, change.tensor.strides());
}

// Whatever fails does so before the first tensor of the stage is swapped.
void run(Stage& stage) {
  WeightQueue queue;
  for (Change* change : stage.changes) {
    const ReplacementGuard guard(change->tensor);
    replace(*change, queue);
    stage.originals.push_back(original_of(*change, stage.undo));
  }
  queue.allocate();
  stage.undo.allocate();
  queue.run();
  for (Change* change : stage.changes) change->tensor.set_data(change->replacement);
}

void undo(const Stage& stage) {
  stage.undo.run();
  for (size_t index = 0; index < stage.changes.size(); ++index) {
    stage.changes[index]->tensor.set_data(stage.originals[index]);
  }
}

// The changes of one device that are of no stage: their bytes, on the CPU in one parallel region, then their metadata.
struct Batch {
  at::Device device;
  std::vector<const Change*> changes = {};
  WeightQueue queue = {};
};

// All that is of no stage, in this order: what is written to new memory of devices, then their batches, one for each
// device, then that of the CPU. Devices may fail. While new memory is written nothing is seen of that; later a device
// that fails takes its own weights with it, and every other weight is converted or as it was.
struct Commit {
  WeightQueue device_writes = {};
  std::vector<Batch> batches = {};
};

// Makes everything that the commit needs.
Commit prepare(std::vector<Change>& changes) {
  Commit commit;
  const auto batch_of = [&](at::Device device) -> Batch& {
    const auto found = std::find_if(commit.batches.begin(), commit.batches.end(),
                                    [&](const Batch& batch) { return batch.device == device; });
    return found == commit.batches.end() ? commit.batches.emplace_back(Batch{device}) : *found;
  };
  for (Change& change : changes) {
    if (change.is_of_a_stage()) continue;
    const at::Tensor& tensor = change.tensor;
    Batch& batch = batch_of(tensor.device());
    batch.changes.push_back(&change);
    const ReplacementGuard guard(tensor);
    if (is_fresh(change.outcome)) {
      replace(change, commit.device_writes);
    } else {
      change.replacement = restrided(tensor, change.strides);
    }
    if (change.is_staged()) {
      change.staged = at::empty_strided(tensor.sizes(), change.strides, tensor.options());
      (tensor.is_cpu() ? batch.queue : commit.device_writes).write_or_queue(tensor, change.staged);
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

void run(const std::vector<Batch>& batches, bool is_cpu) {
  for (const Batch& batch : batches) {
    if (batch.device.is_cpu() == is_cpu) run(batch);
  }
}

// The stages and what may fail on devices, then what cannot fail.
void run(std::vector<Stage>& stages, const Commit& rest) {
  size_t done = 0;
  try {
    rest.device_writes.run();
    for (; done < stages.size(); ++done) run(stages[done]);
    run(rest.batches, /*is_cpu=*/false);
  } catch (...) {
    while (done > 0) undo(stages[--done]);
    throw;
  }
  run(rest.batches, /*is_cpu=*/true);
}

}  // namespace

void commit(const char* op, at::TensorList weights, const std::vector<WeightPlan>& plans) {
  std::vector<Change> changes = changes_of(op, weights, plans);
  if (changes.empty()) return;
  check_no_capture(op, changes);
  find_twins(changes);
  std::vector<Stage> stages = stages_of(changes);
  run(stages, prepare(changes));
  // Autocast keeps low-precision copies of weights; those of the old layout would serve until its region ends.
  at::autocast::clear_cache();
}

}  // namespace nhwc
