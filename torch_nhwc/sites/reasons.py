"""Reasons why a site stays unchanged, or what to know about one that changes. Each has a kind and a sentence."""

import enum
from typing import Any

from torch_nhwc.ops import sentence

ORDER = "convert first, then make the optimizer, then wrap, then compile"
_EACH_FORWARD = "each_forward=True works without changing it"


class Kind(enum.Enum):
    """What a reason says about its site."""

    KEPT = "there is nothing to do, or it was not requested"
    REMARK = "it changes, with a remark"
    REFUSED = "it should change and cannot"
    COMPANION = "a gradient, optimizer state or averaged copy stays unchanged"
    LAYER = "a layer that loses the format stays unchanged"
    FAULT = "PyTorch computes a layer wrong, which is replaced"
    MODEL = "a remark on the whole model or on an optimizer"


class Reason(enum.Enum):
    """Why a weight stays unchanged, or what to know about one that changes.

    The value is the sentence that follows the weight's name in reports. Sentences that C++ gives too come from there.

    Example:
        >>> torch_nhwc.Reason.LAZY.kind.value
        'it changes, with a remark'
    """

    kind: Kind

    def __new__(cls, kind: Kind, sentence: str) -> "Reason":
        """Make a member of a kind whose value is its sentence."""
        reason = object.__new__(cls)
        reason._value_, reason.kind = sentence, kind
        return reason

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle by name, since a later version may word the sentence differently."""
        return getattr, (Reason, self.name)

    IN_FORMAT = Kind.KEPT, sentence("IN_FORMAT")
    TIED = Kind.KEPT, sentence("TIED")
    OTHER_RANK = Kind.KEPT, f"{sentence('OTHER_RANK')}: without one, both ranks convert"
    IN_EACH_FORWARD = (
        Kind.KEPT,
        "it is already converted in each forward: revert, or convert to torch.contiguous_format, to end that",
    )
    FILTERED = Kind.KEPT, sentence("FILTERED")
    ONE_CHANNEL = Kind.KEPT, sentence("ONE_CHANNEL")
    FAKE = Kind.KEPT, "it is a fake tensor: the plan is for the real one"

    META = Kind.REMARK, "it is on the meta device: only its strides change, while a real weight's bytes would move"
    LAZY = Kind.REMARK, "it has no shape yet, and is converted when it is loaded or in the first forward"
    COPIED_EACH_FORWARD = (
        Kind.REMARK,
        "the weight computed from it comes out in another memory format, and is copied into the requested one before "
        "each forward",
    )
    COMPUTED_IN_FORWARD = Kind.REMARK, sentence("COMPUTED_IN_FORWARD")
    OVERLAPPING = (
        Kind.REMARK,
        "its elements overlapped in memory (an expanded tensor): reverting gives contiguous strides",
    )

    COMPUTED = (
        Kind.REFUSED,
        "its weight is computed from other tensors, by a property or by a parametrization that cannot be evaluated on "
        "its own: use torch.ops.nhwc.convert_weight where it is computed",
    )
    ON_THE_FLY = (
        Kind.REFUSED,
        "a convolution's weight is computed from other tensors in forward: use torch.ops.nhwc.convert_weight there",
    )
    ORTHOGONAL = (
        Kind.REFUSED,
        "an orthogonal weight is computed from it, and compiled code takes a view(...) of that, which raises for "
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
        f"weights permuted: {_EACH_FORWARD}, before or after wrapping",
    )
    FSDP2 = (
        Kind.REFUSED,
        f"fully_shard has sharded it, and FSDP2 takes only contiguous parameters: {_EACH_FORWARD}, before or after "
        "wrapping",
    )
    ENGINE = (
        Kind.REFUSED,
        f"a training engine has wrapped it, which may keep its weight in flat buffers: {ORDER}; or {_EACH_FORWARD}",
    )
    COMPILED = (
        Kind.REFUSED,
        "it is compiled, and compiled code may hold its weight as a constant: convert first, then compile. From the "
        "wrapper that torch.compile returns, take model._orig_mod: convert that, and compile it again",
    )
    OFFLOADED = (
        Kind.REFUSED,
        "its values are kept elsewhere and restored before each forward: convert before offloading to the CPU, and "
        f"revert after offloading ends (from a disk they come back contiguous); or {_EACH_FORWARD}, before offloading",
    )
    PER_SAMPLE_GRADIENTS = (
        Kind.REFUSED,
        "Opacus computes per-sample gradients from activations by their strides, and they would be wrong: it needs a "
        "contiguous model with contiguous inputs",
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
        f"the optimizer keeps it in a flat, contiguous bucket, and sends it to other ranks from there: {_EACH_FORWARD}",
    )
    NOT_A_LEAF = Kind.REFUSED, sentence("NOT_A_LEAF")
    NOT_REPLACEABLE = (
        Kind.REFUSED,
        "its module's class cannot be replaced by one that converts the weight in each forward: it is neither one of "
        "PyTorch's convolution layers nor derived from one, is scripted, has a replaced forward, or defines "
        "__reduce__: use torch.ops.nhwc.convert_weight there",
    )
    SUBCLASS = (
        Kind.REFUSED,
        f"{sentence('TRACED')}; {_EACH_FORWARD} if its class supports other packages' operators",
    )
    INNER_HELD = (
        Kind.REFUSED,
        "something else holds the memory of the tensors inside of its tensor subclass, which it would leave (FSDP2, "
        "another weight, a view, a state dict, the tensor that it was made of, a larger storage, another process): "
        f"release that first; or {_EACH_FORWARD} if its class supports other packages' operators",
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
        f"its optimizer state or averaged copy cannot follow, and a step would then be silently wrong: {_EACH_FORWARD}",
    )
    UNSUPPORTED = (
        Kind.REFUSED,
        "the operators do not support it (sparse, nested, released, or of an unexpected rank)",
    )

    OTHER_SHAPE = (
        Kind.COMPANION,
        "this state has another shape than its weight (factored, or a flat history), and no layout in common with it",
    )
    OTHER_KIND = (
        Kind.COMPANION,
        "this state is a tensor subclass or packed (8-bit), and is left to its optimizer",
    )

    REPLACED = Kind.LAYER, "it is already replaced by a layer that keeps channels-last"
    LAZY_LAYER = (
        Kind.LAYER,
        "it is lazy, and has another class after its first forward: call convert_ again then",
    )
    OTHER_CLASS = (
        Kind.LAYER,
        "its class is derived from PyTorch's, and computes in a forward of its own: call torch_nhwc.functional there",
    )
    FORWARD_REPLACED = (
        Kind.LAYER,
        "the forward of the layer or its class has been replaced by other code: convert before that is done",
    )
    OTHER_ARGUMENTS = Kind.LAYER, "there is no replacement that keeps channels-last with its arguments"
    OTHER_DEVICE = (
        Kind.LAYER,
        "it is not on a CPU: on GPUs norms, pads, upsampling and depthwise Conv3d layers alone are replaced, where our "
        "kernels were measured or with TORCH_NHWC_CUDA_NORMS=1",
    )

    STRIDED_POINTWISE = (
        Kind.FAULT,
        "on some CPUs the gradient of its weight is wrong on channels-last, or the process dies. For tools that fuse "
        "or quantize layers by their class, call eval() before convert_, or convert_ after them",
    )

    WRONG_GRADIENTS = (
        Kind.MODEL,
        "preserve=False leaves convolutions in the model whose weight gradients PyTorch computes wrong for inputs so "
        "small that no output sees the whole kernel (on some CPUs), and with groups for views with odd strides in "
        "dimensions of size 1: preserve=True replaces them",
    )
    INSTANCE_NORM = (
        Kind.MODEL,
        "on a CPU, PyTorch's gradient of instance norm is wrong for a batch of 1 if it arrives in channels-last: "
        "layers that preserve=True replaces are right, and so is torch_nhwc.functional.instance_norm. Otherwise train "
        "with larger batches, or use GroupNorm with one group for each channel",
    )
    GROUP_NORM = (
        Kind.MODEL,
        "on a CPU, PyTorch's group norm is inaccurate for channels-last, more so the farther the means are from zero: "
        "layers that preserve=True replaces are right, and so is torch_nhwc.functional.group_norm",
    )
    PIXEL_SHUFFLE = (
        Kind.MODEL,
        "on a CPU, PyTorch's PixelShuffle and PixelUnshuffle raise for volumes in channels-last: layers that "
        "preserve=True replaces take them. Otherwise give them x.contiguous()",
    )
    DEPTHWISE_VOLUMES = (
        Kind.MODEL,
        "on a GPU, cuDNN computes a depthwise Conv3d up to 130 times slower in channels-last than PyTorch does in "
        "contiguous memory, whatever the format of its weight: layers that preserve=True replaces take contiguous "
        "memory, and so does torch_nhwc.functional.conv3d. Otherwise leave the model contiguous",
    )
    BROADCAST = (
        Kind.MODEL,
        "there are several processes: if a checkpoint is broadcast while it is loaded (broadcast_from_rank0), its "
        "channels-last tensors arrive permuted. torch_nhwc.checkpoint has contiguous_checkpoints_, which makes all "
        "state dicts of a model or an optimizer contiguous, and contiguous_state_dict for an existing one",
    )
    SCRIPTED_LAYERS = (
        Kind.MODEL,
        "layers inside of a TorchScript module cannot be replaced: convert before scripting",
    )
    SAVED_WHOLE = (
        Kind.MODEL,
        "torch.save(model) would need torch_nhwc where it is loaded, for replaced layers or the hook for inputs: save "
        "the state dict, or revert first",
    )
    SAVED_STRIDES = (
        Kind.MODEL,
        "to save, take contiguous_state_dict(model) and contiguous_state_dict(optimizer.state_dict()) of "
        "torch_nhwc.checkpoint: without torch_nhwc, a fused CPU optimizer that loads channels-last state gives wrong "
        "updates, silently, and safetensors refuses channels-last weights",
    )


# Reasons against channels-last alone, where contiguous weights are what is needed.
CONTIGUOUS_ONLY = frozenset((Reason.ORTHOGONAL, Reason.PER_SAMPLE_GRADIENTS, Reason.VIEWS_WEIGHT))
