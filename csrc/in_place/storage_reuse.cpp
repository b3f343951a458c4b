#include "in_place/storage_reuse.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MapAllocator.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include "weights/memory_format.h"
#include "writing/weight_queue.h"

namespace nhwc {
namespace {

// Tensors that stand for something else than their own bytes.
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

// DDP and FSDP1 hang their reducers there, and keep views of the gradient in the strides of the moment of wrapping:
// gradients would be permuted silently from then on. Hooks made by register_post_accumulate_grad_hook do not count, and
// a hook of the user's own in this place cannot be told from a reducer.
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

// Whether the one other holder of a storage is its own Python wrapper, and no Python has that. `torch.save`,
// `torch.load` and `untyped_storage()` make a wrapper, and it stays: it counts as a holder of the storage, which holds
// the wrapper in turn for as long as something else holds the storage, here the weight. With two holders and one
// reference to the wrapper these are each other's, and nobody else sees the bytes. In detail:
// - Where somebody may see them, one of the two counts is higher: that of the storage with every tensor over it, and
//   that of the wrapper with every variable, container, frame or other wrapper (`TypedStorage`), of whatever thread.
// - Reading the wrapper's count takes no GIL, which this thread may or may not have. The storage keeps the wrapper
//   alive meanwhile, and a new reference to either could only be made by way of the weight, which no other thread may
//   use; a reference that is just dropped is seen or not, and if it is, the bytes are left alone.
// - Weak references hold nothing, here as in every count: who has one must bear that the storage is gone.
// - Without Python there are no wrappers; after it has ended, no count of one is 1.
//
// A torch that lacks the question, or whose wrappers do not count as holders, is told apart when this is compiled:
// every wrapper holds there.
template <typename Storage>
bool is_held_by_its_wrapper_alone(const Storage& storage) {
  if constexpr (requires {
                  storage.pyobj_slot()->has_unique_reference();
                  storage.incref_pyobject();
                }) {
    return storage.pyobj_slot()->has_unique_reference();
  } else {
    return false;
  }
}

bool is_dense(at::IntArrayRef size, at::IntArrayRef strides) {
  return at::detail::computeStorageNbytes(size, strides, 1) == static_cast<size_t>(c10::multiply_integers(size)) &&
         is_non_overlapping(size, strides);
}

// Reuse where nothing else can see the bytes, else the reason for fresh memory, or for a refusal. The order matters:
// what is shared is foreign too, and what is foreign is often held as well.
Outcome reuse_or_reason(const at::Tensor& weight, at::IntArrayRef strides, bool is_refused) {
  const c10::DataPtr& memory = weight.storage().data_ptr();
  if (is_shared(memory)) return is_refused ? Outcome::shared : Outcome::fresh_shared;
  if (is_foreign(memory)) return is_refused ? Outcome::foreign : Outcome::fresh_foreign;
  if (is_held(weight)) return is_refused ? Outcome::held : Outcome::fresh_held;
  if (weight.is_non_overlapping_and_dense() && is_dense(weight.sizes(), strides) && can_permute(weight)) {
    return Outcome::reused;
  }
  return is_refused ? Outcome::not_permutable : Outcome::fresh;
}

Outcome decide_storage(const at::Tensor& weight, at::IntArrayRef strides, StoragePolicy policy) {
  if (policy == StoragePolicy::fresh) return Outcome::fresh;
  if (is_part_of_larger_storage(weight)) {
    return policy == StoragePolicy::detach ? Outcome::fresh : Outcome::part_of_larger_storage;
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
  // A wrapper can be converted by other means, and its hooks stand against that too.
  if (weight.key_set().has_any(traced_keys)) {
    return has_accumulator_post_hooks(weight) ? Outcome::wrapped : Outcome::traced;
  }
  if (weight.key_set().has_any(lazy_view_keys)) return Outcome::lazy_view;
  if (!weight.is_leaf()) return Outcome::not_a_leaf;
  if (weight.strides() == strides) return Outcome::kept;
  if (has_accumulator_post_hooks(weight)) return Outcome::wrapped;
  return decide_storage(weight, strides, policy);
}

Outcome decide_gradient_outcome(const at::Tensor& weight, at::IntArrayRef strides, Outcome outcome_of_weight) {
  if (is_refusal(outcome_of_weight) || !weight.grad().defined()) return Outcome::kept;
  const at::Tensor& gradient = weight.grad();
  const bool is_plain = gradient.layout() == at::kStrided && !gradient.grad_fn() &&
                        !gradient.key_set().has_any(traced_keys | lazy_view_keys) && gradient.sizes() == weight.sizes();
  if (is_plain && gradient.strides() == strides) return Outcome::kept;
  const Outcome outcome =
      is_plain ? decide_storage(gradient, strides, StoragePolicy::automatic) : Outcome::gradient_in_the_way;
  if (!is_refusal(outcome)) return outcome;
  return outcome_of_weight == Outcome::kept ? Outcome::kept : Outcome::gradient_in_the_way;
}

}  // namespace nhwc
