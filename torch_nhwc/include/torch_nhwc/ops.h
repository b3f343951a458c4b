// The operators of torch_nhwc as C++ functions.
//
// Everything here is inline and calls the operators by name through PyTorch's dispatcher, so including code needs no
// symbol of ours at link time. The library must be loaded when a function is first called, by `import torch_nhwc`,
// `torch.ops.load_library`, `dlopen`, or by linking it. A call without the library raises c10::Error, "Could not find
// schema for nhwc::...".
//
// These declarations are the contracts of the operators; csrc/library.cpp has the schemas.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "torch_nhwc/version.h"

namespace nhwc {

/// The result of an in-place conversion for one weight, or its forecast. Negative values are refusals: only
/// `plan_weights` returns them, and the converting operators raise.
enum class Outcome : std::int64_t {
  unchanged = 0,       ///< in format already: nothing happened
  restrided = 1,       ///< the bytes were in order, or there are none: only the strides changed
  in_place = 2,        ///< the bytes were permuted in their own storage
  copied = 3,          ///< new storage
  copied_held = 4,     ///< new storage, because something else holds the old one (a view, a detached copy)
  copied_foreign = 5,  ///< new storage, because the memory is not from the device's allocator (NumPy, a memory map)
  copied_shared = 6,   ///< new storage, because the memory is shared between processes

  not_a_leaf = -1,              ///< the weight is computed from other tensors
  traced = -2,                  ///< traced, fake, functional or a tensor subclass, or a tracer is active
  wrapped = -3,                 ///< its gradient accumulator has post hooks: DDP or FSDP1 came first
  part_of_larger_storage = -4,  ///< a view, or a slice of a flat parameter buffer
  gradient_in_the_way = -5,     ///< its gradient cannot follow
  lazy_view = -6,               ///< a conjugate or negative view that is not resolved
  held = -7,                    ///< "reuse" only: where "auto" says copied_held
  foreign = -8,                 ///< "reuse" only: where "auto" says copied_foreign
  shared = -9,                  ///< "reuse" only: where "auto" says copied_shared
  not_permutable = -10,         ///< "reuse" only: not dense, or no in-place kernel for the device
};

/// Returns the name of an outcome in capitals, as in Python. A refusal's name is also that of its `sentence`.
inline std::string_view name_of(Outcome outcome) {
  constexpr std::string_view refusals[] = {
      "NOT_A_LEAF", "TRACED",  "WRAPPED", "PART_OF_LARGER_STORAGE", "GRADIENT_IN_THE_WAY", "LAZY_VIEW",
      "HELD",       "FOREIGN", "SHARED",  "NOT_PERMUTABLE"};
  constexpr std::string_view names[] = {"UNCHANGED",   "RESTRIDED",      "IN_PLACE",     "COPIED",
                                        "COPIED_HELD", "COPIED_FOREIGN", "COPIED_SHARED"};
  const auto value = static_cast<std::int64_t>(outcome);
  return value < 0 ? refusals[-1 - value] : names[value];
}

namespace ops_detail {

template <typename Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

inline std::vector<Outcome> as_outcomes(const std::vector<std::int64_t>& values) {
  std::vector<Outcome> outcomes;
  outcomes.reserve(values.size());
  for (const std::int64_t value : values) outcomes.push_back(static_cast<Outcome>(value));
  return outcomes;
}

}  // namespace ops_detail

/// Clones a weight into a memory format, with an optional cast, in one pass.
///
/// @param weight         [O, I, *kernel], 4D or 5D, strided, any strides and dtype, any device.
/// @param memory_format  contiguous, channels-last of the weight's rank, or nothing for the latter.
/// @param dtype          the dtype to cast to in the same pass; between floating-point types only.
/// @returns a tensor with its own memory and the strides of `at::empty(size, memory_format)`. It is differentiable any
///          number of times, in reverse and forward mode. The gradient has the weight's dtype and memory format, and is
///          contiguous where the weight has none.
/// @throws c10::Error for another rank, a format of another rank, a layout that is not strided, or another cast.
inline at::Tensor convert_weight(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format = std::nullopt,
                                 std::optional<at::ScalarType> dtype = std::nullopt) {
  using Signature = at::Tensor(const at::Tensor&, std::optional<at::MemoryFormat>, std::optional<at::ScalarType>);
  static const auto op = ops_detail::find<Signature>("nhwc::convert_weight");
  return op.call(weight, memory_format, dtype);
}

/// Clones each weight of a list, results in order. Ranks, dtypes and devices may be mixed.
inline std::vector<at::Tensor> convert_weights(at::TensorList weights,
                                               std::optional<at::MemoryFormat> memory_format = std::nullopt,
                                               std::optional<at::ScalarType> dtype = std::nullopt) {
  using Signature =
      std::vector<at::Tensor>(at::TensorList, std::optional<at::MemoryFormat>, std::optional<at::ScalarType>);
  static const auto op = ops_detail::find<Signature>("nhwc::convert_weights");
  return op.call(weights, memory_format, dtype);
}

/// Copies the values of a weight into existing memory, as `out.copy_(weight)` does.
///
/// @param out  of the weight's shape and device, in canonical strides of contiguous or channels-last format. Values are
///             cast to its dtype. It must not overlap the weight.
/// @throws c10::Error for another `out`, where a gradient would be recorded, since only values are copied, and as
///         `convert_weight`.
inline void copy_weight_(const at::Tensor& out, const at::Tensor& weight) {
  using Signature = void(const at::Tensor&, const at::Tensor&);
  static const auto op = ops_detail::find<Signature>("nhwc::copy_weight_");
  op.call(out, weight);
}

/// Converts weights to a memory format by `.data` replacement, all or nothing. The tensor objects, their autograd
/// identity, hooks and versions stay (the values are equal). Every weight is checked before anything changes. If memory
/// runs out, every weight has its values and strides as before, some of them in new storage: CPU weights that need new
/// storage are converted 8 MB or one weight at a time, and release their old storage where nothing else holds it. After
/// that, only a failing device can raise. A weight's `.grad` follows it, as under "auto"; the `.grad` of a weight in
/// format joins it where it can. Exact aliases of each other stay exact aliases.
///
/// As with every replacement of `.data`, no other thread may use the weights during the call, and a DLPack export of
/// the weight itself (not of its `detach()`, which holds the storage) is invalid afterwards.
///
/// @param storage  "auto": permute the bytes in place where nothing else can see them, otherwise new storage;
///                 "fresh": new storage for every weight that is not in format (pinned stays pinned);
///                 "reuse": permute in place, or raise where something else could see the bytes;
///                 "detach": as "auto", and a weight that is part of a larger storage leaves it for new storage.
/// @returns the outcome for each weight, in order, never negative.
/// @throws c10::Error, before anything is touched, for a weight that is not a leaf; that is traced, fake, functional or
///         a tensor subclass, or a lazy conjugate or negative view; whose gradient accumulator has post hooks (DDP,
///         FSDP1: convert first, then wrap); that is part of a larger storage, under "auto" and "reuse"; whose gradient
///         is part of a larger storage or graph, or of another shape or layout; whose storage is released; for "reuse"
///         where it is not safe; for another `storage`; as `convert_weight`.
inline std::vector<Outcome> convert_weights_(at::TensorList weights,
                                             std::optional<at::MemoryFormat> memory_format = std::nullopt,
                                             std::string_view storage = "auto") {
  using Signature = std::vector<std::int64_t>(at::TensorList, std::optional<at::MemoryFormat>, c10::string_view);
  static const auto op = ops_detail::find<Signature>("nhwc::convert_weights_");
  return ops_detail::as_outcomes(op.call(weights, memory_format, storage));
}

/// Converts one weight as `convert_weights_` does.
inline Outcome convert_weight_(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format = std::nullopt,
                               std::string_view storage = "auto") {
  using Signature = std::int64_t(const at::Tensor&, std::optional<at::MemoryFormat>, c10::string_view);
  static const auto op = ops_detail::find<Signature>("nhwc::convert_weight_");
  return static_cast<Outcome>(op.call(weight, memory_format, storage));
}

/// Gives tensors of any rank any strides by `.data` replacement, by the rules of `convert_weights_`. This undoes a
/// conversion, and gives optimizer state the strides of its weight. A tensor's `.grad` follows it, unless the list
/// contains the gradient itself.
///
/// @param strides  the strides of all weights, one weight after the other.
/// @throws c10::Error as `convert_weights_`; for another number of strides, and where elements would overlap.
inline std::vector<Outcome> set_strides_(at::TensorList weights, at::IntArrayRef strides,
                                         std::string_view storage = "auto") {
  using Signature = std::vector<std::int64_t>(at::TensorList, at::IntArrayRef, c10::string_view);
  static const auto op = ops_detail::find<Signature>("nhwc::set_strides_");
  return ops_detail::as_outcomes(op.call(weights, strides, storage));
}

/// Returns what `convert_weights_` with the same arguments would do to each weight, refusals included. Changes nothing,
/// and leaves no reference to any storage.
inline std::vector<Outcome> plan_weights(at::TensorList weights,
                                         std::optional<at::MemoryFormat> memory_format = std::nullopt,
                                         std::string_view storage = "auto") {
  using Signature = std::vector<std::int64_t>(at::TensorList, std::optional<at::MemoryFormat>, c10::string_view);
  static const auto op = ops_detail::find<Signature>("nhwc::plan_weights");
  return ops_detail::as_outcomes(op.call(weights, memory_format, storage));
}

/// Returns the indices of the companions (gradients, optimizer state) whose layout is not that of the weight with the
/// same index: kernels that read both in memory order compute wrong values. Strides of dimensions of size 1 do not
/// count. A companion of another shape, or without strides, is passed over.
///
/// @throws c10::Error unless there is one weight for each companion.
inline std::vector<std::int64_t> mismatched_layouts(at::TensorList weights, at::TensorList companions) {
  using Signature = std::vector<std::int64_t>(at::TensorList, at::TensorList);
  static const auto op = ops_detail::find<Signature>("nhwc::mismatched_layouts");
  return op.call(weights, companions);
}

/// Returns why a weight is not converted, and what to do, as a sentence that follows the name of a weight or site.
///
/// @param reason  the name of a refusal, or of another reason; csrc/in_place/sentences.cpp lists all.
/// @throws c10::ValueError for another name.
inline std::string sentence(std::string_view reason) {
  using Signature = std::string(c10::string_view);
  static const auto op = ops_detail::find<Signature>("nhwc::sentence");
  return op.call(reason);
}

}  // namespace nhwc
