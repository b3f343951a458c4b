// The operators of torch_nhwc as C++ functions.
//
// Everything here is inline and calls the operators by name through PyTorch's dispatcher, so including code needs no
// symbol of ours at link time: it is enough that the library is loaded when a function is first called, by
// `import torch_nhwc`, `torch.ops.load_library`, `dlopen`, or by linking it. A call without the library raises
// c10::Error, "Could not find schema for nhwc::...".
//
// The contracts of the operators stand on these declarations; csrc/library.cpp has the schemas.
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

/// What an in-place conversion did, or would do, to one weight. Negative values are refusals; only `plan_weights`
/// returns them, the converting operators raise.
enum class Outcome : std::int64_t {
  kept = 0,           ///< in format already: nothing happened
  restrided = 1,      ///< the bytes were in order, or there are none: only the strides changed
  reused = 2,         ///< the bytes were permuted in their own storage
  fresh = 3,          ///< new storage
  fresh_held = 4,     ///< new storage, because something else holds the old one (a view, a detached copy)
  fresh_foreign = 5,  ///< new storage, because the memory is not from the device's allocator (NumPy, a memory map)
  fresh_shared = 6,   ///< new storage, because the memory is shared between processes

  not_a_leaf = -1,              ///< the weight is computed from other tensors
  traced = -2,                  ///< traced, fake, functional or a tensor subclass, or a tracer is active
  wrapped = -3,                 ///< its gradient accumulator has post hooks: DDP or FSDP1 came first
  part_of_larger_storage = -4,  ///< a view, or a slice of a flat parameter buffer
  gradient_in_the_way = -5,     ///< its gradient cannot follow
  lazy_view = -6,               ///< a conjugate or negative view that is not resolved
  held = -7,                    ///< "reuse" only: where "auto" says fresh_held
  foreign = -8,                 ///< "reuse" only: where "auto" says fresh_foreign
  shared = -9,                  ///< "reuse" only: where "auto" says fresh_shared
  not_permutable = -10,         ///< "reuse" only: not dense, or no in-place kernel for the device
};

/// The name of an outcome in capitals, as in Python; of a refusal it is also the name of its `sentence`.
inline std::string_view name_of(Outcome outcome) {
  constexpr std::string_view refusals[] = {
      "NOT_A_LEAF", "TRACED",  "WRAPPED", "PART_OF_LARGER_STORAGE", "GRADIENT_IN_THE_WAY", "LAZY_VIEW",
      "HELD",       "FOREIGN", "SHARED",  "NOT_PERMUTABLE"};
  constexpr std::string_view names[] = {"KEPT",       "RESTRIDED",     "REUSED",      "FRESH",
                                        "FRESH_HELD", "FRESH_FOREIGN", "FRESH_SHARED"};
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

/// A fused clone of a weight in a memory format.
///
/// @param weight         [O, I, *kernel], 4D or 5D, strided, any strides and dtype, any device.
/// @param memory_format  contiguous, channels-last of the weight's rank, or nothing for the latter.
/// @param dtype          cast to it in the same pass; between floating types only.
/// @returns a tensor of its own memory, in the strides that `at::empty(size, memory_format)` gives. Differentiable any
///          number of times in reverse and forward mode; the gradient arrives in the weight's dtype and memory format,
///          contiguous where it has none.
/// @throws c10::Error for another rank, a format of another rank, a layout that is not strided, another cast.
inline at::Tensor convert_weight(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format = std::nullopt,
                                 std::optional<at::ScalarType> dtype = std::nullopt) {
  using Signature = at::Tensor(const at::Tensor&, std::optional<at::MemoryFormat>, std::optional<at::ScalarType>);
  static const auto op = ops_detail::find<Signature>("nhwc::convert_weight");
  return op.call(weight, memory_format, dtype);
}

/// `convert_weight` for a list, results in order. Ranks, dtypes and devices may be mixed.
inline std::vector<at::Tensor> convert_weights(at::TensorList weights,
                                               std::optional<at::MemoryFormat> memory_format = std::nullopt,
                                               std::optional<at::ScalarType> dtype = std::nullopt) {
  using Signature =
      std::vector<at::Tensor>(at::TensorList, std::optional<at::MemoryFormat>, std::optional<at::ScalarType>);
  static const auto op = ops_detail::find<Signature>("nhwc::convert_weights");
  return op.call(weights, memory_format, dtype);
}

/// Copies the values of a weight into memory that is there already, as `out.copy_(weight)` does.
///
/// @param out  of the weight's shape and device, in canonical strides of contiguous or channels-last format; its dtype
///             is the one to cast to. It must not overlap the weight.
/// @throws c10::Error for another `out`, for what `convert_weight` raises for, and where a gradient would be recorded:
///         values alone are copied.
inline void copy_weight_(const at::Tensor& out, const at::Tensor& weight) {
  using Signature = void(const at::Tensor&, const at::Tensor&);
  static const auto op = ops_detail::find<Signature>("nhwc::copy_weight_");
  op.call(out, weight);
}

/// Brings weights into a memory format by `.data` replacement: same tensor objects, same autograd identity and hooks,
/// no version bump (the values are equal). All or nothing: every weight is checked before anything changes, and where
/// memory runs out, every weight has its values and strides as before, some of them in new storage: of CPU weights that
/// need new storage, 8 MB or one weight at a time are converted and give their old storage back, where nothing else
/// holds it. Then only a device that fails can stop it. A weight's `.grad` follows it, as under "auto"; the `.grad` of
/// a weight that is in format already joins it where it can. Weights that are exact aliases of each other stay so.
///
/// As with every replacement of `.data`, no other thread may use the weights during the call, and a DLPack export of
/// the weight itself (not of its `detach()`, which holds the storage) is invalid afterwards.
///
/// @param storage  "auto": permute the bytes in place where nothing else can see them, else new storage;
///                 "fresh": new storage for every weight that is not in format (pinned stays pinned);
///                 "reuse": permute in place, or raise where something else could see it;
///                 "detach": as "auto", and a weight that is part of a larger storage leaves it for new storage.
/// @returns the outcome for each weight, in order, never negative.
/// @throws c10::Error, before anything is touched, for a weight that is not a leaf; that is traced, fake, functional or
///         a tensor subclass, or a lazy conjugate or negative view; whose gradient accumulator has post hooks (DDP,
///         FSDP1: convert first, then wrap); that is part of a larger storage, under "auto" and "reuse"; whose gradient
///         is part of a larger storage or graph, or of another shape or layout; whose storage is released; for "reuse"
///         where it is not safe; for another `storage`; for what `convert_weight` raises for.
inline std::vector<Outcome> convert_weights_(at::TensorList weights,
                                             std::optional<at::MemoryFormat> memory_format = std::nullopt,
                                             std::string_view storage = "auto") {
  using Signature = std::vector<std::int64_t>(at::TensorList, std::optional<at::MemoryFormat>, c10::string_view);
  static const auto op = ops_detail::find<Signature>("nhwc::convert_weights_");
  return ops_detail::as_outcomes(op.call(weights, memory_format, storage));
}

/// `convert_weights_` for one weight.
inline Outcome convert_weight_(const at::Tensor& weight, std::optional<at::MemoryFormat> memory_format = std::nullopt,
                               std::string_view storage = "auto") {
  using Signature = std::int64_t(const at::Tensor&, std::optional<at::MemoryFormat>, c10::string_view);
  static const auto op = ops_detail::find<Signature>("nhwc::convert_weight_");
  return static_cast<Outcome>(op.call(weight, memory_format, storage));
}

/// Brings tensors of any rank into any strides by `.data` replacement, by the rules of `convert_weights_`: what undoes
/// a conversion, and what lays out optimizer state as its weight lies. A tensor's `.grad` follows it, unless it is in
/// the list itself.
///
/// @param strides  those of all weights, one weight after the other.
/// @throws c10::Error as `convert_weights_`; for another number of strides, and for strides by which elements overlap.
inline std::vector<Outcome> lay_out_weights_(at::TensorList weights, at::IntArrayRef strides,
                                             std::string_view storage = "auto") {
  using Signature = std::vector<std::int64_t>(at::TensorList, at::IntArrayRef, c10::string_view);
  static const auto op = ops_detail::find<Signature>("nhwc::lay_out_weights_");
  return ops_detail::as_outcomes(op.call(weights, strides, storage));
}

/// What `convert_weights_` with the same arguments would do to each weight, refusals included. Changes nothing and
/// leaves no trace on the weights' storages.
inline std::vector<Outcome> plan_weights(at::TensorList weights,
                                         std::optional<at::MemoryFormat> memory_format = std::nullopt,
                                         std::string_view storage = "auto") {
  using Signature = std::vector<std::int64_t>(at::TensorList, std::optional<at::MemoryFormat>, c10::string_view);
  static const auto op = ops_detail::find<Signature>("nhwc::plan_weights");
  return ops_detail::as_outcomes(op.call(weights, memory_format, storage));
}

/// The indices of the companions (gradients, optimizer state) whose elements do not lie as those of the weight with the
/// same index, by which kernels that read both by place go wrong. Strides of dimensions of size 1 do not count; what is
/// of another shape than its weight, or not strided, has no layout to share and is passed over.
///
/// @throws c10::Error where there is not one weight for each companion.
inline std::vector<std::int64_t> differing_layouts(at::TensorList weights, at::TensorList companions) {
  using Signature = std::vector<std::int64_t>(at::TensorList, at::TensorList);
  static const auto op = ops_detail::find<Signature>("nhwc::differing_layouts");
  return op.call(weights, companions);
}

/// The sentence that says why a weight is left as it is, and what to do, as it follows the name of a weight or a site.
///
/// @param reason  the name of an outcome that is a refusal, or of another reason; csrc/weights/sentences.cpp has all.
/// @throws c10::ValueError for another name.
inline std::string sentence(std::string_view reason) {
  using Signature = std::string(c10::string_view);
  static const auto op = ops_detail::find<Signature>("nhwc::sentence");
  return op.call(reason);
}

}  // namespace nhwc
