// The in-place operators: check everything, allocate and compute everything, commit. Only the commit changes what is
// seen from outside, and it cannot fail.
//
// They are composite, so that they see the tensors themselves: below autograd, functionalization would drop the change
// of strides in silence. Whatever stands for another tensor is refused instead.
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "convert_weight.h"
#include "cpu/convert_weight.h"
#include "memory_format.h"
#include "storage_reuse.h"

namespace nhwc {
namespace {

// One tensor to bring into its format: a weight, or the gradient that follows one.
struct Task {
  at::Tensor tensor;
  at::MemoryFormat memory_format;
  Outcome outcome;
  at::Tensor replacement = {};  // what the tensor becomes by set_data
  at::Tensor staged = {};       // values on their way back into a reused storage

  bool needs_fresh_storage() const { return outcome >= Outcome::fresh; }
  // Dense strides of neither order cannot be permuted filter by filter: their values go through a whole copy.
  bool is_staged() const { return outcome == Outcome::reused && filter_order(tensor) == FilterOrder::neither; }
  bool is_permuted() const { return outcome == Outcome::reused && !is_staged(); }
};

// The arguments of one call, checked as far as they concern all weights.
struct Call {
  const char* op;
  at::TensorList weights;
  std::optional<at::MemoryFormat> memory_format;
  StoragePolicy policy;
  // The references to each weight that its owner and the call hold: see decide_outcome.
  std::unordered_map<const at::TensorImpl*, size_t> known_references = {};

  Call(const char* op, at::TensorList weights, std::optional<at::MemoryFormat> memory_format, c10::string_view storage,
       size_t references_per_mention)
      : op(op), weights(weights), memory_format(memory_format), policy(parse_storage_policy(op, storage)) {
    for (const at::Tensor& weight : weights) {
      known_references.try_emplace(weight.unsafeGetTensorImpl(), 1).first->second += references_per_mention;
    }
  }

  // What is to be done to one weight, a refusal included.
  Outcome outcome_of(const at::Tensor& weight, at::MemoryFormat format) const {
    const Outcome outcome =
        decide_outcome(weight, format, policy, known_references.at(weight.unsafeGetTensorImpl()));
    const bool moves = outcome > Outcome::kept;
    return moves && weight.grad().defined() && is_refusal(decide_gradient_outcome(weight.grad(), format))
               ? Outcome::gradient_in_the_way
               : outcome;
  }

  // The outcome for every weight, in order.
  std::vector<Outcome> plan() const {
    std::vector<Outcome> outcomes;
    outcomes.reserve(weights.size());
    for (const at::Tensor& weight : weights) {
      outcomes.push_back(outcome_of(weight, resolve_memory_format(op, weight, memory_format)));
    }
    return outcomes;
  }

  // The tasks that the outcomes amount to: each tensor once, gradients behind their weights, nothing for what is kept.
  std::vector<Task> tasks(const std::vector<Outcome>& outcomes) const {
    std::vector<Task> tasks;
    std::unordered_set<const at::TensorImpl*> seen;
    const auto add = [&](const at::Tensor& tensor, at::MemoryFormat format, Outcome outcome) {
      if (outcome == Outcome::kept || !seen.insert(tensor.unsafeGetTensorImpl()).second) return;
      tasks.push_back({tensor, format, outcome});
    };
    for (size_t index = 0; index < weights.size(); ++index) {
      const at::Tensor& weight = weights[index];
      const Outcome outcome = outcomes[index];
      TORCH_CHECK(!is_refusal(outcome), op, ": weight ", index, " of ", weights.size(), " ", refusal_sentence(outcome),
                  " (", describe(weight), ")");
      const auto format = memory_format.value_or(channels_last_of(weight));
      const at::Tensor& gradient = weight.grad();
      if (outcome != Outcome::kept && gradient.defined()) {
        add(gradient, format, decide_gradient_outcome(gradient, format));
      }
      add(weight, format, outcome);
    }
    return tasks;
  }
};

// New tensors are normal tensors even in inference mode, or a converted parameter could never train again.
struct LikeTensor {
  explicit LikeTensor(const at::Tensor& tensor) : inference(tensor.is_inference()) {}
  c10::InferenceMode inference;
  at::NoGradGuard no_grad;
};

bool are_aliases(const at::Tensor& a, const at::Tensor& b) {
  return a.is_alias_of(b) && a.storage_offset() == b.storage_offset() && a.sizes() == b.sizes() &&
         a.strides() == b.strides() && a.scalar_type() == b.scalar_type();
}

// Makes and fills every replacement. Tensors that are exact aliases of each other stay so: they share one.
void prepare(const char* op, std::vector<Task>& tasks) {
  std::unordered_map<const c10::StorageImpl*, std::vector<const Task*>> by_storage;
  std::vector<const Task*> to_write;
  for (Task& task : tasks) {
    const LikeTensor guard(task.tensor);
    const at::Tensor& tensor = task.tensor;
    if (task.needs_fresh_storage()) {
      auto& neighbours = by_storage[tensor.storage().unsafeGetStorageImpl()];
      const auto alias = std::find_if(neighbours.begin(), neighbours.end(), [&](const Task* other) {
        return are_aliases(tensor, other->tensor);
      });
      if (alias != neighbours.end()) {
        task.replacement = (*alias)->replacement.detach();
        continue;
      }
      neighbours.push_back(&task);
      const auto options = tensor.options().pinned_memory(tensor.is_cpu() && tensor.is_pinned());
      task.replacement = at::empty(tensor.sizes(), options, task.memory_format);
      to_write.push_back(&task);
    } else {
      task.replacement =
          tensor.detach().as_strided(tensor.sizes(), canonical_strides(tensor.sizes(), task.memory_format));
    }
    if (task.is_staged()) {
      task.staged = at::empty(tensor.sizes(), tensor.options(), task.memory_format);
      to_write.push_back(&task);
    }
    TORCH_CHECK(!is_traced(task.replacement), op,
                ": a fake tensor mode or a tracer is active: convert in place outside of it");
  }
  for (const Task* task : to_write) {
    const LikeTensor guard(task->tensor);
    write_weight(task->tensor.detach(), task->staged.defined() ? task->staged : task->replacement);
  }
}

// Permutes where storage is reused, and swaps the replacements in.
void commit(const std::vector<Task>& tasks, const at::Tensor& scratch) {
  for (const Task& task : tasks) {
    if (task.staged.defined()) {
      std::memcpy(task.tensor.mutable_data_ptr(), task.staged.const_data_ptr(), task.tensor.nbytes());
    } else if (task.is_permuted()) {
      cpu::permute_weight(task.tensor, scratch.mutable_data_ptr());
    }
    at::Tensor(task.tensor).set_data(task.replacement);
  }
}

std::vector<int64_t> as_integers(const std::vector<Outcome>& outcomes) {
  std::vector<int64_t> integers;
  integers.reserve(outcomes.size());
  for (const Outcome outcome : outcomes) integers.push_back(static_cast<int64_t>(outcome));
  return integers;
}

std::vector<int64_t> convert_in_place(const Call& call) {
  const std::vector<Outcome> outcomes = call.plan();
  std::vector<Task> tasks = call.tasks(outcomes);
  if (tasks.empty()) return as_integers(outcomes);
  int64_t scratch_bytes = 0;
  for (const Task& task : tasks) {
    if (task.is_permuted()) scratch_bytes = std::max(scratch_bytes, cpu::permute_scratch_bytes(task.tensor));
  }
  const at::Tensor scratch = at::empty({scratch_bytes}, at::kByte);
  prepare(call.op, tasks);
  commit(tasks, scratch);
  // Autocast keeps low-precision copies of weights; those of the old layout would serve until its region ends.
  at::autocast::clear_cache();
  return as_integers(outcomes);
}

// A list is copied once more on its way from the dispatcher's boxed call.
constexpr size_t references_per_list_mention = 2;
constexpr size_t references_per_mention = 1;

std::vector<int64_t> plan_weights_kernel(at::TensorList weights, std::optional<at::MemoryFormat> memory_format,
                                         c10::string_view storage) {
  return as_integers(Call("nhwc::plan_weights", weights, memory_format, storage, references_per_list_mention).plan());
}

std::vector<int64_t> convert_weights_kernel_(at::TensorList weights, std::optional<at::MemoryFormat> memory_format,
                                             c10::string_view storage) {
  return convert_in_place(
      Call("nhwc::convert_weights_", weights, memory_format, storage, references_per_list_mention));
}

int64_t convert_weight_kernel_(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format,
                               c10::string_view storage) {
  return convert_in_place(Call("nhwc::convert_weight_", weight, memory_format, storage, references_per_mention))
      .front();
}

}  // namespace

TORCH_LIBRARY_IMPL(nhwc, CompositeImplicitAutograd, m) {
  m.impl("convert_weight_", TORCH_FN(convert_weight_kernel_));
  m.impl("convert_weights_", TORCH_FN(convert_weights_kernel_));
  m.impl("plan_weights", TORCH_FN(plan_weights_kernel));
}

// torch.jit.trace would otherwise run the operators first and fail to record them second.
TORCH_LIBRARY_IMPL(nhwc, Tracer, m) {
  m.impl("convert_weight_", TORCH_FN(convert_weight_kernel_));
  m.impl("convert_weights_", TORCH_FN(convert_weights_kernel_));
  m.impl("plan_weights", TORCH_FN(plan_weights_kernel));
}

}  // namespace nhwc
