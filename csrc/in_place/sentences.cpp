#include "in_place/sentences.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <iterator>

namespace nhwc {
namespace {

// Errors may open a sentence in other words, because there the weight is the subject.
struct Sentence {
  std::string_view reason, opening, rest = "", opening_of_errors = "";
};

constexpr Sentence sentences[] = {
    // Sites of a module.
    {"IN_FORMAT", "it has the strides of the format already"},
    {"TIED", "it is the same tensor as an earlier site's, and changes with it"},
    {"OTHER_RANK", "the memory format is of the other rank"},
    {"FILTERED", "the filter left it out"},
    {"ONE_CHANNEL",
     "its filters have one channel, for which both formats are the same bytes: it has contiguous strides, with which "
     "PyTorch's own convolutions are right"},
    {"UNDEFINED", "the layer has no weight"},
    {"COMPUTED_IN_FORWARD",
     "the weight that reaches the convolution is computed from it: use torch.ops.nhwc.convert_weight there"},
    {"PACKED", "its weight is packed (quantized, or for oneDNN): convert before packing"},
    {"FROZEN", "its weight is a constant of a frozen TorchScript module: convert before freezing"},
    {"TIED_BY_VIEW",
     "another parameter or buffer of the model reads the same memory in another way (a transposed or reshaped view, or "
     "no convolution weight), and a conversion would separate them: give each its own memory, or keep one parameter "
     "and compute the other from it"},

    // Refusals of the operators.
    {"NOT_A_LEAF",
     "it is not a leaf of the autograd graph: convert the tensors that it is computed from, or use convert_weight"},
    {"TRACED",
     "it is traced, fake, functional or of a tensor subclass, or a tracer is active: convert in place before tracing, "
     "compiling or wrapping, or use convert_weight"},
    {"WRAPPED", "its gradient accumulator has post hooks",
     ", as DDP and FSDP leave there, and its gradients would be permuted: convert first, then make the optimizer, then "
     "wrap, then compile",
     "has post hooks on its gradient accumulator"},
    {"PART_OF_LARGER_STORAGE",
     "it is part of a larger storage (a view, or a flat buffer of parameters) that it would leave: pass "
     "storage='fresh' or 'detach' if that is intended"},
    {"GRADIENT_IN_THE_WAY", "its gradient cannot follow",
     " (it is part of a larger storage or of a graph, of another shape, or not strided): set .grad to None first",
     "has a gradient that cannot follow"},
    {"LAZY_VIEW", "it is a lazy conjugate or negative view: replace it by its resolve_conj() or resolve_neg() first"},

    // Refusals to permute in place.
    {"HELD",
     "something else holds its storage (a view, a detached copy, a state dict, a variable with its untyped_storage()); "
     "use storage='auto' or 'fresh'"},
    {"FOREIGN",
     "its memory is not from the device's own allocator (NumPy, a memory map, pinned); use storage='auto' or 'fresh'"},
    {"SHARED", "its memory is shared or mapped; use storage='auto' or 'fresh'"},
    {"NOT_PERMUTABLE",
     "its strides are not dense, or its device has no in-place kernel; use storage='auto' or 'fresh'"},
};

const Sentence& find(std::string_view reason) {
  const auto* found = std::find_if(std::begin(sentences), std::end(sentences),
                                   [&](const Sentence& sentence) { return sentence.reason == reason; });
  TORCH_CHECK_VALUE(found != std::end(sentences), "nhwc::sentence: expected the name of a reason, as ",
                    sentences[0].reason, ", got '", reason, "'");
  return *found;
}

}  // namespace

std::string sentence_of(std::string_view reason) {
  const Sentence& sentence = find(reason);
  return std::string(sentence.opening).append(sentence.rest);
}

std::string refusal_of(Outcome refusal) {
  const Sentence& sentence = find(name_of(refusal));
  constexpr std::string_view subject = "it ";
  if (!sentence.opening_of_errors.empty()) return std::string(sentence.opening_of_errors).append(sentence.rest);
  if (sentence.opening.substr(0, subject.size()) == subject)
    return std::string(sentence.opening.substr(subject.size()));
  return std::string("cannot be permuted in place: ").append(sentence.opening);
}

}  // namespace nhwc
