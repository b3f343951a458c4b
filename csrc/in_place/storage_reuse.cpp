#include "in_place/storage_reuse.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MapAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include "batch/weight_batch.h"
#include "layout/memory_format.h"

namespace nhwc {
namespace {

// Tensors that represent something else than their own bytes.
constexpr c10::DispatchKeySet traced_keys({
    c10::DispatchKey::Python,
    c10::DispatchKey::Functionalize,
    c10::DispatchKey::FuncTorchBatched,
    c10::DispatchKey::FuncTorchGradWrapper,
    c10::DispatchKey::BatchedNestedTensor,
    c10::DispatchKey::Batched,
});
constexpr c10::DispatchKeySet lazy_view_keys({
    c10::DispatchKey::Conjugate,
    c10::DispatchKey::Negative,
    c10::DispatchKey::ZeroTensor,
});

// DDP and FSDP1 register their reducers there, and keep views of the gradient in the strides that it had when they
// wrapped the model: a conversion would silently permute all later gradients. Hooks of
// register_post_accumulate_grad_hook do not count. A user's own hook in this place cannot be distinguished.
bool has_accumulator_post_hooks(const at::Tensor& weight) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(weight);
  return accumulator && !accumulator->post_hooks().empty();
}

bool is_part_of_larger_storage(const at::Tensor& weight) {
  const size_t span = at::detail::computeStorageNbytes(weight.sizes(), weight.strides(), weight.element_size());
  return weight.storage_offset() != 0 || weight.storage().nbytes() > span;
}

bool is_shared(const c10::DataPtr& memory) {
  return at::MapAllocator::fromDataPtr(memory) || at::RefcountedMapAllocator::fromDataPtr(memory);
}

bool is_foreign(const c10::DataPtr& memory) {
  const c10::Allocator* allocator = c10::GetAllocator(memory.device().type());
  return !allocator || !allocator->raw_deleter() || memory.get_deleter() != allocator->raw_deleter();
}

// Returns whether the only other holder of a storage is its own Python wrapper, to which Python has no reference.
// `torch.save`, `torch.load` and `untyped_storage()` make a wrapper that stays: it holds the storage, and the storage
// holds the wrapper while something else, here the weight, holds the storage. If the storage has two holders and the
// wrapper one reference, nothing else sees the bytes. In detail:
// - Anything that can see the bytes raises one of the two counts: tensors that of the storage; variables, containers,
//   frames and other wrappers (`TypedStorage`) of any thread that of the wrapper.
// - The count of the wrapper is read without the GIL, which this thread may or may not hold. The storage keeps the
//   wrapper alive, and new references could only be made through the weight, which no other thread may use. If a
//   reference that is being dropped is still counted, the bytes are left alone.
// - Weak references hold nothing, as everywhere: their owners must expect that the storage is gone.
// - Without Python there are no wrappers; after Python has ended, no wrapper's count is 1.
bool is_held_by_its_wrapper_alone(const c10::StorageImpl& storage) {
  return storage.pyobj_slot()->has_unique_reference();
}

bool is_dense(at::IntArrayRef size, at::IntArrayRef strides) {
  return at::detail::computeStorageNbytes(size, strides, 1) == static_cast<size_t>(c10::multiply_integers(size)) &&
         is_non_overlapping(size, strides);
}

// Returns in_place where nothing else can see the bytes, otherwise the reason for new memory or for a refusal. The
// order matters: shared memory is also foreign, and foreign memory is often held as well.
Outcome reuse_or_reason(const at::Tensor& weight, at::IntArrayRef strides, bool is_refused) {
  const c10::DataPtr& memory = weight.storage().data_ptr();
  if (is_shared(memory)) return is_refused ? Outcome::shared : Outcome::copied_shared;
  if (is_foreign(memory)) return is_refused ? Outcome::foreign : Outcome::copied_foreign;
  if (is_held(weight)) return is_refused ? Outcome::held : Outcome::copied_held;
  if (weight.is_non_overlapping_and_dense() && is_dense(weight.sizes(), strides) && can_permute(weight)) {
    return Outcome::in_place;
  }
  return is_refused ? Outcome::not_permutable : Outcome::copied;
}

Outcome decide_storage(const at::Tensor& weight, at::IntArrayRef strides, StoragePolicy policy) {
  if (policy == StoragePolicy::fresh) return Outcome::copied;
  if (is_part_of_larger_storage(weight)) {
    return policy == StoragePolicy::detach ? Outcome::copied : Outcome::part_of_larger_storage;
  }
  const bool moves_nothing =
      weight.numel() == 0 || are_same_places(weight, strides) ||
      (weight.is_meta() && weight.is_non_overlapping_and_dense() && is_dense(weight.sizes(), strides));
  return moves_nothing ? Outcome::restrided : reuse_or_reason(weight, strides, policy == StoragePolicy::reuse);
}

}  // namespace

bool is_held(const at::Tensor& weight) {
  const c10::Storage& storage = weight.storage();
  const size_t holders = storage.use_count();
  return holders > 2 || (holders == 2 && !is_held_by_its_wrapper_alone(*storage.unsafeGetStorageImpl()));
}

StoragePolicy parse_storage_policy(const char* op, std::string_view storage) {
  if (storage == "auto") return StoragePolicy::automatic;
  if (storage == "fresh") return StoragePolicy::fresh;
  if (storage == "reuse") return StoragePolicy::reuse;
  if (storage == "detach") return StoragePolicy::detach;
  TORCH_CHECK_VALUE(false, op, ": expected storage to be 'auto', 'fresh', 'reuse' or 'detach', got '", storage, "'");
}

bool is_tracing() {
  using Mode = c10::impl::TorchDispatchModeKey;
  const auto is_active = [](Mode mode) { return c10::impl::TorchDispatchModeTLS::get_mode(mode).has_value(); };
  return torch::jit::tracer::isTracing() || is_active(Mode::FAKE) || is_active(Mode::PROXY) ||
         is_active(Mode::FUNCTIONAL);
}

Outcome decide_outcome(const at::Tensor& weight, at::IntArrayRef strides, StoragePolicy policy) {
  // A wrapper subclass can be converted in other ways, which its hooks rule out too.
  if (weight.key_set().has_any(traced_keys)) {
    return has_accumulator_post_hooks(weight) ? Outcome::wrapped : Outcome::traced;
  }
  if (weight.key_set().has_any(lazy_view_keys)) return Outcome::lazy_view;
  if (!weight.is_leaf()) return Outcome::not_a_leaf;
  if (weight.strides() == strides) return Outcome::unchanged;
  if (has_accumulator_post_hooks(weight)) return Outcome::wrapped;
  return decide_storage(weight, strides, policy);
}

Outcome decide_gradient_outcome(const at::Tensor& weight, at::IntArrayRef strides, Outcome outcome_of_weight) {
  if (is_refusal(outcome_of_weight) || !weight.grad().defined()) return Outcome::unchanged;
  const at::Tensor& gradient = weight.grad();
  const bool is_plain = gradient.layout() == at::kStrided && !gradient.grad_fn() &&
                        !gradient.key_set().has_any(traced_keys | lazy_view_keys) && gradient.sizes() == weight.sizes();
  if (is_plain && gradient.strides() == strides) return Outcome::unchanged;
  const Outcome outcome =
      is_plain ? decide_storage(gradient, strides, StoragePolicy::automatic) : Outcome::gradient_in_the_way;
  if (!is_refusal(outcome)) return outcome;
  return outcome_of_weight == Outcome::unchanged ? Outcome::unchanged : Outcome::gradient_in_the_way;
}

}  // namespace nhwc
