"""Why a site stays as it is, or what to know about one that changes: one code, kind and sentence each."""

import enum

ORDER = "convert first, then make the optimizer, then wrap, then compile"


class Kind(enum.Enum):
    """What a reason says of its site."""

    KEPT = "there is nothing to do, or it was not asked for"
    REMARK = "it changes, and deserves a remark"
    REFUSED = "it should change and cannot"
    COMPANION = "a gradient, a state or an averaged copy stays as it is"
    MODEL = "a remark on the whole model or on an optimizer"


class Reason(enum.Enum):
    """A code whose value is the sentence that follows a site's name in reports; `make docs` lists them in the guide."""

    kind: Kind

    def __new__(cls, kind: Kind, sentence: str) -> "Reason":
        reason = object.__new__(cls)
        reason._value_, reason.kind = sentence, kind
        return reason

    IN_FORMAT = Kind.KEPT, "its strides are the wanted ones already"
    TIED = Kind.KEPT, "it is the same tensor as an earlier site's, and changes with it"
    OTHER_RANK = Kind.KEPT, "the memory format is of the other rank: without one, both ranks convert"
    FILTERED = Kind.KEPT, "filter_fn left it out"
    FAKE = Kind.KEPT, "it is a fake tensor: the plan is for the real one"

    META = Kind.REMARK, "it is on the meta device: only its strides change, where a real weight's bytes move"
    LAZY = Kind.REMARK, "it has no shape before the first forward, and is converted then"
    COPIED_EACH_FORWARD = (
        Kind.REMARK,
        ("the weight is computed from it in another memory format, and copied into the wanted one before each forward"),
    )
    COMPUTED_IN_FORWARD = (
        Kind.REMARK,
        (
            "the weight that reaches the convolution is computed from it in forward: "
            "torch.ops.nhwc.convert_weight there makes sure that it is in format"
        ),
    )

    OVERLAPPING = (
        Kind.REMARK,
        "its elements overlapped in memory (an expanded tensor): undoing gives contiguous strides",
    )

    COMPUTED = (
        Kind.REFUSED,
        (
            "its weight is computed from other tensors (by a property, or a parametrization that cannot be evaluated by "
            "itself): use torch.ops.nhwc.convert_weight where it is computed"
        ),
    )
    ON_THE_FLY = (
        Kind.REFUSED,
        ("a convolution's weight is computed in forward from other tensors: use torch.ops.nhwc.convert_weight there"),
    )
    NO_WEIGHT = Kind.REFUSED, "its weight is not a tensor"
    PACKED = Kind.REFUSED, "its weight is packed (quantized, or for oneDNN): convert before packing"
    FROZEN = Kind.REFUSED, "its weight is a constant of a frozen TorchScript module: convert before freezing"
    DDP = Kind.REFUSED, f"DistributedDataParallel has wrapped it, and its gradients would be permuted: {ORDER}"
    FSDP1 = (
        Kind.REFUSED,
        (
            f"FullyShardedDataParallel keeps its weight in a flat buffer: {ORDER}; but leave the model contiguous where "
            "optimizer state is to be loaded, since FSDP1 loads that of channels-last weights permuted"
        ),
    )
    FSDP2 = (
        Kind.REFUSED,
        (
            "fully_shard has sharded it; FSDP2 takes contiguous parameters only, so that today no order works: "
            "leave this model contiguous"
        ),
    )
    ENGINE = Kind.REFUSED, f"a training engine has wrapped it, which may keep its weight in flat buffers: {ORDER}"
    COMPILED = Kind.REFUSED, f"it is compiled, and compiled code may hold its weight as a constant: {ORDER}"
    OFFLOADED = (
        Kind.REFUSED,
        (
            "its values are kept elsewhere and put back before each forward: convert before offloading to the CPU "
            "(from a disk they come back contiguous)"
        ),
    )
    FLATTENING_OPTIMIZER = (
        Kind.REFUSED,
        "the optimizer takes a view(-1) of it or of its gradient, which needs contiguous memory",
    )
    NOT_A_LEAF = Kind.REFUSED, "it is not a leaf of the autograd graph: convert the tensors that it is computed from"
    SUBCLASS = Kind.REFUSED, "it is a tensor subclass, or a tracer is active: convert before wrapping and tracing"
    WRAPPED = Kind.REFUSED, f"its gradient accumulator has post hooks, as DDP and FSDP leave there: {ORDER}"
    PART_OF_LARGER_STORAGE = (
        Kind.REFUSED,
        (
            "it is part of a larger storage (a view, or a flat buffer of parameters) that it would leave: "
            "ask for storage='detach' or 'fresh' if that is meant"
        ),
    )
    GRADIENT_IN_THE_WAY = (
        Kind.REFUSED,
        (
            "its gradient cannot follow (it is part of a larger storage or of a graph, of another shape, or not strided): "
            "set .grad to None first"
        ),
    )
    LAZY_VIEW = Kind.REFUSED, "it is a lazy conjugate or negative view: resolve it first"
    HELD = Kind.REFUSED, "something else holds its storage, and storage='reuse' was asked for"
    FOREIGN = Kind.REFUSED, "its memory is not from the device's own allocator, and storage='reuse' was asked for"
    SHARED = Kind.REFUSED, "its memory is shared or mapped, and storage='reuse' was asked for"
    NOT_PERMUTABLE = (
        Kind.REFUSED,
        ("its strides are not dense, or the device has no in-place kernel, and storage='reuse' was asked for"),
    )
    STATE_IN_THE_WAY = (
        Kind.REFUSED,
        "its optimizer state or averaged copy cannot follow, and a step would then be silently wrong",
    )
    UNSUPPORTED = Kind.REFUSED, "the operators do not take it (sparse, nested, released, or of an unexpected rank)"

    OTHER_SHAPE = (
        Kind.COMPANION,
        ("this state is of another shape than its weight (factored, or a flat history), and has no layout to share"),
    )
    OTHER_KIND = Kind.COMPANION, "this state is a tensor subclass or packed (8-bit), and is left to its optimizer"

    VIEWS_PARAMETERS = (
        Kind.MODEL,
        "this optimizer's code calls .view(...) on tensors: a channels-last weight may make it raise",
    )
    INSTANCE_NORM = (
        Kind.MODEL,
        (
            "PyTorch's gradient of instance norm on a CPU is wrong where a channels-last one arrives and the batch is 1: "
            "train with larger batches, or use GroupNorm with one group for each channel"
        ),
    )
