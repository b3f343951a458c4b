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

#include "batch/weight_batch.h"
#include "cuda/filter_batch.h"
#include "in_place/sentences.h"
#include "layout/arguments.h"

namespace nhwc {
namespace {

// One tensor that changes: a weight or a gradient.
struct Change {
  at::Tensor tensor;
  Strides strides;
  Outcome outcome;
  at::Tensor replacement = {};   // what set_data makes of the tensor
  at::Tensor staged = {};        // values that will be copied back into the same storage
  const Change* twin = nullptr;  // an earlier change of an exact alias, with which this one shares new storage

  // New memory on the CPU is allocated in stages.
  bool is_of_a_stage() const { return tensor.is_cpu() && is_copied(outcome); }

  // Dense strides of neither order cannot be permuted filter by filter: the values are copied out and back.
  bool is_staged() const {
    return outcome == Outcome::in_place &&
           (filter_order(tensor) == FilterOrder::neither || filter_order(replacement) == FilterOrder::neither);
  }
};

// A replay of a graph would permute the bytes again.
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

// Lists the changes of all plans, each tensor once. Raises for the first refusal.
std::vector<Change> changes_of(const char* op, at::TensorList weights, const std::vector<WeightPlan>& plans) {
  std::vector<Change> changes;
  std::unordered_set<const at::TensorImpl*> seen;
  const auto add = [&](const at::Tensor& tensor, const Strides& strides, Outcome outcome) {
    if (!seen.insert(tensor.unsafeGetTensorImpl()).second || outcome == Outcome::unchanged) return;
    changes.push_back({tensor, strides, outcome});
  };
  for (size_t index = 0; index < weights.size(); ++index) {
    const WeightPlan& plan = plans[index];
    TORCH_CHECK(!is_refusal(plan.outcome), Argument{op, index, weights.size()}, ": the weight ",
                refusal_of(plan.outcome), " (", describe(weights[index]), ")");
    add(weights[index], plan.strides, plan.outcome);
  }
  // A gradient that is itself in the list gets the strides of its own plan.
  for (size_t index = 0; index < weights.size(); ++index) {
    const WeightPlan& plan = plans[index];
    if (plan.gradient_outcome != Outcome::unchanged) add(weights[index].grad(), plan.strides, plan.gradient_outcome);
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

// The same as detach().as_strided(...) without two dispatches: models have thousands of tensors.
at::Tensor restrided(const at::Tensor& tensor, at::IntArrayRef strides) {
  auto copy = tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0),
                                                                    /*allow_tensor_metadata_change=*/true);
  copy->set_sizes_and_strides(tensor.sizes(), strides);
  return at::Tensor(std::move(copy));
}

// Exact aliases stay exact aliases: they share one new storage.
void find_twins(std::vector<Change>& changes) {
  std::unordered_map<const c10::StorageImpl*, std::vector<const Change*>> by_storage;
  for (Change& change : changes) {
    const at::Tensor& tensor = change.tensor;
    // A storage with one holder has no alias.
    if (!is_copied(change.outcome) || tensor.storage().use_count() == 1) continue;
    auto& neighbours = by_storage[tensor.storage().unsafeGetStorageImpl()];
    const auto twin = std::find_if(neighbours.begin(), neighbours.end(),
                                   [&](const Change* other) { return are_aliases(tensor, other->tensor); });
    twin == neighbours.end() ? neighbours.push_back(&change) : void(change.twin = *twin);
  }
}

// Allocates the new storage of a change. The values are written at once, or by the batch.
void replace(Change& change, WeightBatch& batch) {
  const at::Tensor& tensor = change.tensor;
  if (change.twin) {
    change.replacement = change.twin->replacement.detach();
    return;
  }
  // is_pinned() takes as long as everything else. A storage that is merely held is the allocator's, and not pinned.
  const bool may_be_pinned = tensor.is_cpu() && change.outcome != Outcome::copied_held;
  const auto options = tensor.options().pinned_memory(may_be_pinned && tensor.is_pinned());
  change.replacement = at::empty_strided(tensor.sizes(), change.strides, options);
  batch.write_or_add(tensor, change.replacement);
}

// New memory on the CPU is allocated, written and swapped in by stages of this size, or of one weight. A stage releases
// the old memory of its weights before the next one allocates: peak memory is one stage above the memory before or
// after the call, whichever is more.
constexpr int64_t bytes_of_a_stage = 8 << 20;

struct Stage {
  std::vector<Change*> changes = {};
  std::vector<at::Tensor> originals = {};  // what the tensors become if a later stage fails
  WeightBatch undo = {};                   // then permutes the values of new storage to the old order
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

// Returns what a tensor becomes if a later stage fails. Old memory is kept for that where others hold or share it, or
// where new memory cannot take its strides. Otherwise it is released, and a permutation within the new storage will
// restore the old order of the values.
at::Tensor original_of(const Change& change, WeightBatch& undo) {
  const FilterOrder from = filter_order(change.tensor), to = filter_order(change.replacement);
  const bool is_kept = change.outcome == Outcome::copied_shared || is_held(change.tensor) ||
                       from == FilterOrder::neither || to == FilterOrder::neither;
  if (is_kept) return restrided(change.tensor, change.tensor.strides());
  if (from != to && from != FilterOrder::either && to != FilterOrder::either) undo.add_permutation(change.replacement);
  return restrided(change.replacement, change.tensor.strides());
}

// If anything fails, it fails before the first tensor of the stage is swapped.
void run(Stage& stage) {
  WeightBatch batch;
  for (Change* change : stage.changes) {
    const ReplacementGuard guard(change->tensor);
    replace(*change, batch);
    stage.originals.push_back(original_of(*change, stage.undo));
  }
  batch.allocate();
  stage.undo.allocate();
  batch.run();
  for (Change* change : stage.changes) change->tensor.set_data(change->replacement);
}

void undo(const Stage& stage) {
  stage.undo.run();
  for (size_t index = 0; index < stage.changes.size(); ++index) {
    stage.changes[index]->tensor.set_data(stage.originals[index]);
  }
}

// The changes of one device that belong to no stage: first their bytes, on the CPU in one parallel region, then their
// metadata.
struct DeviceChanges {
  at::Device device;
  std::vector<const Change*> changes = {};
  WeightBatch batch = {};
};

// Everything that belongs to no stage, in this order: writes to new memory of devices, then the changes of each device,
// then those of the CPU. A device may fail. While new memory is written, no weight has changed. Later, a failing device
// loses its own weights, and every other weight is either converted or unchanged.
struct Commit {
  WeightBatch device_writes = {};
  std::vector<DeviceChanges> devices = {};
};

// Allocates everything that the commit needs.
Commit prepare(std::vector<Change>& changes) {
  Commit commit;
  const auto changes_on = [&](at::Device device) -> DeviceChanges& {
    const auto found = std::find_if(commit.devices.begin(), commit.devices.end(),
                                    [&](const DeviceChanges& on) { return on.device == device; });
    return found == commit.devices.end() ? commit.devices.emplace_back(DeviceChanges{device}) : *found;
  };
  for (Change& change : changes) {
    if (change.is_of_a_stage()) continue;
    const at::Tensor& tensor = change.tensor;
    DeviceChanges& on_device = changes_on(tensor.device());
    on_device.changes.push_back(&change);
    const ReplacementGuard guard(tensor);
    if (is_copied(change.outcome)) {
      replace(change, commit.device_writes);
    } else {
      change.replacement = restrided(tensor, change.strides);
    }
    if (change.is_staged()) {
      change.staged = at::empty_strided(tensor.sizes(), change.strides, tensor.options());
      (tensor.is_cpu() ? on_device.batch : commit.device_writes).write_or_add(tensor, change.staged);
    } else if (change.outcome == Outcome::in_place) {
      on_device.batch.add_permutation(tensor);
    }
  }
  commit.device_writes.allocate();
  for (DeviceChanges& on_device : commit.devices) on_device.batch.allocate();
  return commit;
}

// Copies the staged values into the storage that they came from.
void write_back(const Change& change) {
  if (change.tensor.is_cpu()) {
    std::memcpy(change.tensor.mutable_data_ptr(), change.staged.const_data_ptr(), change.tensor.nbytes());
  } else {
    const ReplacementGuard guard(change.tensor);
    at::Tensor(change.replacement).copy_(change.staged);
  }
}

// Another stream than the allocation's may still read the old memory of a weight: it must not be reused before that
// stream has finished.
void outlive_reads(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return;
  const c10::impl::VirtualGuardImpl guard(tensor.device().type());
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), guard.getStream(tensor.device()));
}

// Writes and permutes the bytes, then swaps the replacements in.
void run(const DeviceChanges& on_device) {
  on_device.batch.run();
  for (const Change* change : on_device.changes) {
    if (change->staged.defined()) write_back(*change);
    if (is_copied(change->outcome)) outlive_reads(change->tensor);
    at::Tensor(change->tensor).set_data(change->replacement);
  }
}

void run(const std::vector<DeviceChanges>& devices, bool is_cpu) {
  for (const DeviceChanges& on_device : devices) {
    if (on_device.device.is_cpu() == is_cpu) run(on_device);
  }
}

// Runs the stages and the devices, which may fail, then what cannot fail.
void run(std::vector<Stage>& stages, const Commit& rest) {
  size_t done = 0;
  try {
    rest.device_writes.run();
    for (; done < stages.size(); ++done) run(stages[done]);
    run(rest.devices, /*is_cpu=*/false);
  } catch (...) {
    while (done > 0) undo(stages[--done]);
    throw;
  }
  run(rest.devices, /*is_cpu=*/true);
}

}  // namespace

void commit(const char* op, at::TensorList weights, const std::vector<WeightPlan>& plans) {
  std::vector<Change> changes = changes_of(op, weights, plans);
  if (changes.empty()) return;
  check_no_capture(op, changes);
  find_twins(changes);
  std::vector<Stage> stages = stages_of(changes);
  run(stages, prepare(changes));
  // Autocast caches low-precision copies of weights. Those in the old layout would be used until its region ends.
  at::autocast::clear_cache();
}

}  // namespace nhwc
