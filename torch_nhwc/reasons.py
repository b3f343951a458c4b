"""Why a site stays as it is, or what to know about one that changes: one code, kind and sentence each."""

import enum
from typing import Any

from torch_nhwc.ops import sentence

ORDER = "convert first, then make the optimizer, then wrap, then compile"
_EACH_FORWARD = "each_forward=True takes it as it is"


class Kind(enum.Enum):
    """What a reason says of its site."""

    KEPT = "there is nothing to do, or it was not asked for"
    REMARK = "it changes, and deserves a remark"
    REFUSED = "it should change and cannot"
    COMPANION = "a gradient, a state or an averaged copy stays as it is"
    LAYER = "a layer that loses on channels-last stays as it is"
    MODEL = "a remark on the whole model or on an optimizer"


class Reason(enum.Enum):
    """A reason says why a weight stays as it is, or what to know about one that changes.

    The value is the sentence that follows the weight's name in reports. Those that C++ says as well are its own; `make
    docs` writes all of them into the guide.

    Example:
        >>> torch_nhwc.Reason.IN_FORMAT.value
        'its strides are the wanted ones already'
    """

    kind: Kind

    def __new__(cls, kind: Kind, sentence: str) -> "Reason":
        reason = object.__new__(cls)
        reason._value_, reason.kind = sentence, kind
        return reason

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickled by name, since sentences may become others."""
        return getattr, (Reason, self.name)

    IN_FORMAT = Kind.KEPT, sentence("IN_FORMAT")
    TIED = Kind.KEPT, sentence("TIED")
    OTHER_RANK = Kind.KEPT, f"{sentence('OTHER_RANK')}: without one, both ranks convert"
    IN_EACH_FORWARD = (
        Kind.KEPT,
        "it is converted in each forward already: revert, or a conversion to torch.contiguous_format, ends that",
    )
    FILTERED = Kind.KEPT, sentence("FILTERED")
    FASTER_CONTIGUOUS = Kind.KEPT, "the model is faster with it as it is, as it was measured"
    ONE_CHANNEL = Kind.KEPT, sentence("ONE_CHANNEL")
    DIFFERS = Kind.KEPT, "converted, it would compute something else than it does, as verify has found"
    FAKE = Kind.KEPT, "it is a fake tensor: the plan is for the real one"

    META = Kind.REMARK, "it is on the meta device: only its strides change, where a real weight's bytes move"
    LAZY = Kind.REMARK, "it has no shape yet, and is converted when it is loaded, or in the first forward"
    COPIED_EACH_FORWARD = (
        Kind.REMARK,
        "the weight is computed from it in another memory format, and copied into the wanted one before each forward",
    )
    COMPUTED_IN_FORWARD = Kind.REMARK, sentence("COMPUTED_IN_FORWARD")
    OVERLAPPING = (
        Kind.REMARK,
        "its elements overlapped in memory (an expanded tensor): undoing gives contiguous strides",
    )

    COMPUTED = (
        Kind.REFUSED,
        "its weight is computed from other tensors (by a property, or a parametrization that cannot be evaluated by "
        "itself): use torch.ops.nhwc.convert_weight where it is computed",
    )
    ON_THE_FLY = (
        Kind.REFUSED,
        "a convolution's weight is computed in forward from other tensors: use torch.ops.nhwc.convert_weight there",
    )
    ORTHOGONAL = (
        Kind.REFUSED,
        "an orthogonal weight is computed from it, of which compiled code takes a view(...) that raises for "
        f"channels-last: {_EACH_FORWARD}",
    )
    NO_WEIGHT = Kind.REFUSED, "its weight is not a tensor"
    PACKED = Kind.REFUSED, sentence("PACKED")
    FROZEN = Kind.REFUSED, sentence("FROZEN")
    DDP = (
        Kind.REFUSED,
        f"DistributedDataParallel has wrapped it, and its gradients would be permuted: {ORDER}; or {_EACH_FORWARD}",
    )
    FSDP1 = (
        Kind.REFUSED,
        "FullyShardedDataParallel keeps its weight in a flat buffer, and loads optimizer state of channels-last "
        f"weights permuted: {_EACH_FORWARD}, before wrapping or after",
    )
    FSDP2 = (
        Kind.REFUSED,
        f"fully_shard has sharded it, and FSDP2 takes contiguous parameters only: {_EACH_FORWARD}, before wrapping or "
        "after",
    )
    ENGINE = (
        Kind.REFUSED,
        f"a training engine has wrapped it, which may keep its weight in flat buffers: {ORDER}; or {_EACH_FORWARD}",
    )
    COMPILED = Kind.REFUSED, f"it is compiled, and compiled code may hold its weight as a constant: {ORDER}"
    OFFLOADED = (
        Kind.REFUSED,
        "its values are kept elsewhere and put back before each forward: convert before offloading to the CPU, and "
        f"revert once that is over (from a disk they come back contiguous); or {_EACH_FORWARD}, before offloading",
    )
    PER_SAMPLE_GRADIENTS = (
        Kind.REFUSED,
        "Opacus takes the gradients of each sample from activations by their strides, and they would be wrong: it "
        "needs a contiguous model with contiguous inputs",
    )
    VIEWS_WEIGHT = (
        Kind.REFUSED,
        "its layer (OFT, BOFT, HRA or DoRA of PEFT) or TorchScript code takes a view(...) of it, in forward or when it "
        f"is merged, which raises for channels-last: outside of TorchScript, {_EACH_FORWARD}",
    )
    FLATTENING_OPTIMIZER = (
        Kind.REFUSED,
        f"the optimizer takes a view(-1) of it or of its gradient, which needs contiguous memory: {_EACH_FORWARD}",
    )
    BUCKET_VIEW = (
        Kind.REFUSED,
        f"the optimizer keeps it in a flat bucket, contiguous, and sends it to other ranks from there: {_EACH_FORWARD}",
    )
    NOT_A_LEAF = Kind.REFUSED, sentence("NOT_A_LEAF")
    NOT_EXCHANGEABLE = (
        Kind.REFUSED,
        "its module cannot be exchanged for one that converts the weight in each forward, since it is no convolution "
        "layer of PyTorch's or derived from one, is scripted, has had its forward replaced, or its class has its own "
        "__reduce__: use torch.ops.nhwc.convert_weight there",
    )
    SUBCLASS = Kind.REFUSED, f"{sentence('TRACED')}; {_EACH_FORWARD} where its class takes other packages' operators"
    INNER_HELD = (
        Kind.REFUSED,
        "something else holds the memory of the tensors inside of its tensor subclass, which it would leave (FSDP2, "
        "another weight, a view, a state dict, the tensor that it was made of, a larger storage, another process): let "
        f"go of it first; or {_EACH_FORWARD} where its class takes other packages' operators",
    )
    WRAPPED = Kind.REFUSED, f"{sentence('WRAPPED')}; or {_EACH_FORWARD}"
    PART_OF_LARGER_STORAGE = Kind.REFUSED, f"{sentence('PART_OF_LARGER_STORAGE')}; or {_EACH_FORWARD}"
    TIED_BY_VIEW = Kind.REFUSED, f"{sentence('TIED_BY_VIEW')}; or {_EACH_FORWARD}"
    GRADIENT_IN_THE_WAY = Kind.REFUSED, sentence("GRADIENT_IN_THE_WAY")
    LAZY_VIEW = Kind.REFUSED, sentence("LAZY_VIEW")
    HELD = Kind.REFUSED, sentence("HELD")
    FOREIGN = Kind.REFUSED, sentence("FOREIGN")
    SHARED = Kind.REFUSED, sentence("SHARED")
    NOT_PERMUTABLE = Kind.REFUSED, sentence("NOT_PERMUTABLE")
    STATE_IN_THE_WAY = (
        Kind.REFUSED,
        "its optimizer state or averaged copy cannot follow, and a step would then be silently wrong",
    )
    UNSUPPORTED = (
        Kind.REFUSED,
        "the operators do not take it (sparse, nested, released, or of an unexpected rank)",
    )

    OTHER_SHAPE = (
        Kind.COMPANION,
        "this state is of another shape than its weight (factored, or a flat history), and has no layout to share",
    )
    OTHER_KIND = (
        Kind.COMPANION,
        "this state is a tensor subclass or packed (8-bit), and is left to its optimizer",
    )

    EXCHANGED = Kind.LAYER, "it is exchanged already, and keeps channels-last"
    LAZY_LAYER = (
        Kind.LAYER,
        "it is lazy, and has another class after its first forward: exchange it by another call then",
    )
    OTHER_CLASS = (
        Kind.LAYER,
        "its class derives from PyTorch's and is not one that is known here: what its forward does cannot be exchanged",
    )
    FORWARD_REPLACED = (
        Kind.LAYER,
        "its forward was replaced, on the layer or its class: an exchange would not be right",
    )
    OTHER_ARGUMENTS = Kind.LAYER, "there is no form of it that keeps channels-last for its arguments"
    OTHER_DEVICE = Kind.LAYER, "it is not on a CPU, and what it loses elsewhere was not measured"

    VIEWS_PARAMETERS = (
        Kind.MODEL,
        "this optimizer takes views of tensors, by which channels-last weights make it raise (tried on a small one or, "
        "where that cannot be, its code calls .view): each_forward=True leaves weights contiguous",
    )
    INSTANCE_NORM = (
        Kind.MODEL,
        "PyTorch's gradient of instance norm on a CPU is wrong where a channels-last one arrives and the batch is 1: "
        "exchange the layers by preserve=True, train with larger batches, or use GroupNorm with one group for each "
        "channel",
    )
    GROUP_NORM = (
        Kind.MODEL,
        "PyTorch's group norm on a CPU is inaccurate on channels-last, the more the farther means lie from zero: "
        "exchange the layers by preserve=True",
    )
    BROADCAST = (
        Kind.MODEL,
        "there are several processes: where a checkpoint is broadcast on loading (broadcast_from_rank0), its "
        "channels-last tensors arrive permuted. contiguous_checkpoints_(model), and of an optimizer, makes state dicts "
        "contiguous, and contiguous_state_dict(checkpoint) one that is there already",
    )
    SCRIPTED_LAYERS = (
        Kind.MODEL,
        "layers inside of a TorchScript module cannot be exchanged: convert with preserve=True before scripting",
    )
    SAVED_WHOLE = (
        Kind.MODEL,
        "a whole model that torch.save writes with exchanged layers, or with a hook for its inputs, needs torch_nhwc "
        "where it is loaded: save its state dict, or revert first",
    )


# Those against channels-last alone: contiguous weights are what is needed there.
CONTIGUOUS_ONLY = frozenset((Reason.ORTHOGONAL, Reason.PER_SAMPLE_GRADIENTS, Reason.VIEWS_WEIGHT))
