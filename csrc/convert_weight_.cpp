// The in-place operators: check everything, allocate everything, commit. Only the commit changes what is seen from
// outside, and it cannot fail unless a device does.
//
// They are composite, so that they see the tensors themselves: below autograd, functionalization would drop the change
// of strides in silence. Whatever stands for another tensor is refused instead.
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "convert_weight.h"
#include "cpu/convert_weight.h"
#include "device_conversions.h"
#include "memory_format.h"
#include "storage_reuse.h"

namespace nhwc {
namespace {

// The decision for one weight, and for the gradient that goes with it.
struct WeightPlan {
  Strides strides;
  Outcome outcome;
  Outcome gradient_outcome;
};

WeightPlan plan_weight(const Argument& argument, const at::Tensor& weight, Strides strides, StoragePolicy policy) {
  const Outcome outcome = decide_outcome(weight, strides, policy);
  if (outcome > Outcome::kept) check_storage(argument, weight);
  const Outcome gradient_outcome = decide_gradient_outcome(weight, strides, outcome);
  return {std::move(strides), is_refusal(gradient_outcome) ? gradient_outcome : outcome, gradient_outcome};
}

std::vector<WeightPlan> plan_format(const char* op, at::TensorList weights,
                                    std::optional<at::MemoryFormat> memory_format, StoragePolicy policy) {
  std::vector<WeightPlan> plans;
  plans.reserve(weights.size());
  for (size_t index = 0; index < weights.size(); ++index) {
    const Argument argument{op, index, weights.size()};
    const at::Tensor& weight = weights[index];
    const auto format = resolve_memory_format(argument, weight, memory_format);
    // Symbolic sizes belong to tensors that are refused.
    const bool has_sizes = !weight.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
    Strides strides = has_sizes ? canonical_strides(weight.sizes(), format) : Strides{};
    plans.push_back(plan_weight(argument, weight, std::move(strides), policy));
  }
  return plans;
}

// `strides` are those of all weights, one weight after the other.
std::vector<WeightPlan> plan_strides(const char* op, at::TensorList weights, at::IntArrayRef strides,
                                     StoragePolicy policy) {
  std::vector<WeightPlan> plans;
  plans.reserve(weights.size());
  for (size_t index = 0; index < weights.size(); ++index) {
    const Argument argument{op, index, weights.size()};
    const at::Tensor& weight = weights[index];
    check_strided(argument, weight);
    const size_t dim = weight.dim();
    TORCH_CHECK(strides.size() >= dim, argument, ": there are fewer strides than dimensions");
    const at::IntArrayRef wanted = strides.slice(0, dim);
    TORCH_CHECK(is_non_overlapping(weight.sizes(), wanted), argument,
                ": expected strides by which no elements overlap, ", "got ", wanted, " for ", describe(weight));
    plans.push_back(plan_weight(argument, weight, wanted.vec(), policy));
    strides = strides.slice(dim);
  }
  TORCH_CHECK(strides.empty(), op, ": there are ", strides.size(), " strides more than dimensions");
  return plans;
}

std::vector<int64_t> outcomes_of(const std::vector<WeightPlan>& plans) {
  std::vector<int64_t> outcomes;
  outcomes.reserve(plans.size());
  for (const WeightPlan& plan : plans) outcomes.push_back(static_cast<int64_t>(plan.outcome));
  return outcomes;
}

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
  bool is_permuted() const { return outcome == Outcome::reused && !is_staged(); }
};

// Replays of a graph would permute the bytes again.
void check_no_capture(const char* op, const std::vector<Change>& changes) {
  std::optional<at::Device> asked;
  for (const Change& change : changes) {
    if (change.outcome == Outcome::restrided || change.tensor.device() == asked) continue;
    asked = change.tensor.device();
    TORCH_CHECK(
        !is_captured(change.tensor), op,
        ": expected no CUDA graph to be captured: its replays would permute the bytes again; convert before the "
        "capture");
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
                refusal_sentence(plan.outcome), " (", describe(weights[index]), ")");
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
  std::vector<const Change*> changes = {};
  cpu::Conversions conversions = {};
  DeviceConversions permutations = {};
};

// All that is left to do, in this order: what is written to new memory of devices, then a batch for each device, then
// those of the CPU. Devices may fail. While new memory is written nothing is seen of that; later a device that fails
// takes its own weights with it, and every other weight is converted or as it was.
struct Commit {
  DeviceConversions device_writes;
  std::vector<Batch> device_batches, batches;
};

// Each batch gives the old memory of its weights back before the next one first touches its new memory: the system
// hands the same pages out again, and the peak of a whole model is a batch above what it was.
constexpr int64_t fresh_bytes_of_a_batch = 8 << 20;

// Makes every replacement, and everything that the commit needs. Tensors that are exact aliases of each other stay so:
// they share one.
Commit prepare(std::vector<Change>& changes) {
  std::unordered_map<const c10::StorageImpl*, std::vector<const Change*>> by_storage;
  Commit commit;
  std::vector<Batch>& batches = commit.batches;
  batches.emplace_back();
  int64_t fresh_bytes = 0;
  const auto write = [&](const at::Tensor& tensor, const at::Tensor& out) {
    const at::NoGradGuard no_grad;
    if (tensor.is_cpu()) {
      fresh_bytes += static_cast<int64_t>(out.nbytes());
      batches.back().conversions.add_write(tensor.detach(), out);
    } else {
      commit.device_writes.add_write(tensor.detach(), out);
    }
  };
  const auto batch_of = [&](at::Device device) -> Batch& {
    if (device.is_cpu()) {
      if (fresh_bytes <= fresh_bytes_of_a_batch) return batches.back();
      fresh_bytes = 0;
      return batches.emplace_back();
    }
    auto& of_devices = commit.device_batches;
    const auto found = std::find_if(of_devices.begin(), of_devices.end(), [&](const Batch& batch) {
      return batch.changes.front()->tensor.device() == device;
    });
    return found != of_devices.end() ? *found : of_devices.emplace_back();
  };
  for (Change& change : changes) {
    const at::Tensor& tensor = change.tensor;
    Batch& batch = batch_of(tensor.device());
    batch.changes.push_back(&change);
    const ReplacementGuard guard(tensor);
    if (is_fresh(change.outcome)) {
      auto& neighbours = by_storage[tensor.storage().unsafeGetStorageImpl()];
      const auto alias = std::find_if(neighbours.begin(), neighbours.end(),
                                      [&](const Change* other) { return are_aliases(tensor, other->tensor); });
      if (alias != neighbours.end()) {
        change.replacement = (*alias)->replacement.detach();
        continue;
      }
      neighbours.push_back(&change);
      const auto options = tensor.options().pinned_memory(tensor.is_cpu() && tensor.is_pinned());
      change.replacement = empty_weight(tensor.sizes(), change.strides, options);
      write(tensor, change.replacement);
    } else {
      change.replacement = restrided(tensor, change.strides);
    }
    if (change.is_staged()) {
      change.staged = empty_weight(tensor.sizes(), change.strides, tensor.options());
      write(tensor, change.staged);
    } else if (change.is_permuted() && tensor.is_cpu()) {
      batch.conversions.add_permutation(tensor);
    } else if (change.is_permuted()) {
      batch.permutations.add_permutation(tensor);
    }
  }
  commit.device_writes.allocate();
  for (Batch& batch : commit.device_batches) batch.permutations.allocate();
  for (Batch& batch : batches) batch.conversions.allocate();
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
  batch.permutations.run();
  batch.conversions.run();
  for (const Change* change : batch.changes) {
    if (change->staged.defined()) write_back(*change);
    if (is_fresh(change->outcome)) outlive_reads(change->tensor);
    at::Tensor(change->tensor).set_data(change->replacement);
  }
}

void run(const Commit& commit) {
  commit.device_writes.run();
  for (const Batch& batch : commit.device_batches) run(batch);
  for (const Batch& batch : commit.batches) run(batch);
}

std::vector<int64_t> apply(const char* op, at::TensorList weights, const std::vector<WeightPlan>& plans) {
  std::vector<Change> changes = changes_of(op, weights, plans);
  if (changes.empty()) return outcomes_of(plans);
  check_no_capture(op, changes);
  run(prepare(changes));
  // Autocast keeps low-precision copies of weights; those of the old layout would serve until its region ends.
  at::autocast::clear_cache();
  return outcomes_of(plans);
}

std::vector<int64_t> plan_weights_kernel(at::TensorList weights, std::optional<at::MemoryFormat> memory_format,
                                         c10::string_view storage) {
  constexpr const char* op = "nhwc::plan_weights";
  return outcomes_of(plan_format(op, weights, memory_format, parse_storage_policy(op, storage)));
}

std::vector<int64_t> convert_in_place(const char* op, at::TensorList weights,
                                      std::optional<at::MemoryFormat> memory_format, c10::string_view storage) {
  return apply(op, weights, plan_format(op, weights, memory_format, parse_storage_policy(op, storage)));
}

std::vector<int64_t> convert_weights_kernel_(at::TensorList weights, std::optional<at::MemoryFormat> memory_format,
                                             c10::string_view storage) {
  return convert_in_place("nhwc::convert_weights_", weights, memory_format, storage);
}

int64_t convert_weight_kernel_(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format,
                               c10::string_view storage) {
  return convert_in_place("nhwc::convert_weight_", weight, memory_format, storage).front();
}

std::vector<int64_t> lay_out_weights_kernel_(at::TensorList weights, at::IntArrayRef strides,
                                             c10::string_view storage) {
  constexpr const char* op = "nhwc::lay_out_weights_";
  return apply(op, weights, plan_strides(op, weights, strides, parse_storage_policy(op, storage)));
}

void register_kernels(torch::Library& m) {
  m.impl("convert_weight_", TORCH_FN(convert_weight_kernel_));
  m.impl("convert_weights_", TORCH_FN(convert_weights_kernel_));
  m.impl("lay_out_weights_", TORCH_FN(lay_out_weights_kernel_));
  m.impl("plan_weights", TORCH_FN(plan_weights_kernel));
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) { register_kernels(m); }

// Here the kernels only refuse, with the same words as everywhere: torch.jit.trace would run the operators first and
// fail to record them second, vmap would speak of batching rules, and functionalize of alias annotations.
TORCH_LIBRARY_IMPL(nhwc, Tracer, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(nhwc, FuncTorchBatchedDecomposition, m) { register_kernels(m); }
TORCH_LIBRARY_IMPL(nhwc, Functionalize, m) { register_kernels(m); }

}  // namespace nhwc
