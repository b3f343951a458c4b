"""The operators of `torch.ops.nhwc`, typed and documented.

The functions here add types to `torch.ops.nhwc.*`, and make a graph break of `torch.compile` around the in-place ones.
In TorchScript call `torch.ops.nhwc.*` itself.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TypeVar, cast

import torch
from torch import Tensor

from torch_nhwc import library
from torch_nhwc.outcomes import Outcome, Storage

library.load()

_OUTCOMES = {int(outcome): outcome for outcome in Outcome}  # faster than the enumeration itself, for long lists
_F = TypeVar("_F", bound=Callable[..., object])

# PyTorch looks for a `__torch_function__` in every memory format that an operator is given, which takes as long as the
# conversion of a small weight; it does not look into the number that stands for one. Whoever overrides the operator (a
# tracer, a mode, a subclass) therefore sees the number.
_NUMBERS: dict[object, object] = {
    None: None,
    torch.contiguous_format: 0,
    torch.preserve_format: 1,  # which the operator refuses
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
_convert_weight = torch.ops.nhwc.convert_weight.default


def convert_weight(
    weight: Tensor, memory_format: torch.memory_format | None = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Clones a weight into a memory format, in one pass over its bytes, with a cast if one is asked for.

    Args:
        weight: `[O, I, *kernel]`, 4D or 5D, any strides, dtype and device.
        memory_format: `torch.contiguous_format`, or channels-last of the weight's rank, which is the default.
        dtype: cast to it in the same pass; between floating types only.

    Returns:
        A tensor of its own memory, of the weight's shape, in the strides that `torch.empty(weight.shape,
        memory_format=memory_format)` has. Differentiable any number of times, in reverse and forward mode; the gradient
        arrives in the weight's dtype and memory format, contiguous where it has none.

    Raises:
        RuntimeError: the weight is not 4D or 5D, or the format is not one of its rank.
        NotImplementedError: the weight is sparse, quantized, nested or of another layout that is not strided.
        TypeError: the cast is not between floating types; `weight` is not a tensor, or `memory_format` is not a
            `torch.memory_format`.

    Example:
        >>> torch_nhwc.convert_weight(torch.randn(8, 3, 3, 3), dtype=torch.bfloat16).stride()
        (27, 1, 9, 3)
    """
    try:
        number = _NUMBERS[memory_format]
    except (KeyError, TypeError):  # what is not in there may have no hash either
        _expect("convert_weight", memory_format, weight)
        number = memory_format
    try:
        if dtype is None:
            converted: Tensor = _convert_weight(weight, number)
        else:
            converted = _convert_weight(weight, number, dtype=dtype)
    except RuntimeError:  # the check before the call would take a tenth of it
        _expect("convert_weight", memory_format, weight)
        raise
    return converted


def convert_weights(
    weights: Sequence[Tensor], memory_format: torch.memory_format | None = None, *, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Does what `convert_weight` does for a list: results in order; ranks, dtypes and devices may be mixed.

    Raises:
        TypeError: `weights` is one tensor or a module; or what `convert_weight` raises, as the other errors are.

    Example:
        >>> [each.stride() for each in torch_nhwc.convert_weights([torch.ones(8, 3, 3, 3), torch.ones(8, 3, 1, 3, 3)])]
        [(27, 1, 9, 3), (27, 1, 27, 9, 3)]
    """
    weights = _as_list("convert_weights", weights, memory_format)
    return cast(list[Tensor], torch.ops.nhwc.convert_weights(weights, memory_format, dtype=dtype))


def copy_weight_(out: Tensor, weight: Tensor) -> Tensor:
    """Copies the values of a weight into memory that is there already, as `out.copy_(weight)` does.

    For weights that are converted again and again, into buffers whose pages are resident. Values alone are copied:
    under `torch.no_grad()`, or from and to tensors that need no gradient.

    Args:
        out: of the weight's shape and device, in the canonical strides of `torch.contiguous_format` or of
            channels-last; its dtype is the one to cast to. It must not overlap the weight.
        weight: `[O, I, *kernel]`, 4D or 5D, any strides and dtype.

    Returns:
        `out`.

    Raises:
        RuntimeError: `out` is of another shape, device or strides, it overlaps the weight, or a gradient is needed.
        TypeError: the cast is not between floating types; `out` or `weight` is not a tensor.

    Example:
        >>> weight = torch.randn(8, 3, 3, 3)
        >>> buffer = torch.empty(8, 3, 3, 3, memory_format=torch.channels_last)
        >>> torch.equal(torch_nhwc.copy_weight_(buffer, weight), weight)
        True
    """
    _expect("copy_weight_", None, out, weight)
    torch.ops.nhwc.copy_weight_(out, weight)
    return out


def cpu_capability() -> str:
    """Names the instruction set of the CPU kernels: `"baseline"`, `"avx2"`, `"avx512"`, `"avx512_vbmi"` or `"neon"`.

    The best one that this CPU has, chosen once. The environment variable `TORCH_NHWC_CPU_CAPABILITY` names another;
    without it, PyTorch's `ATEN_CPU_CAPABILITY` is an upper bound.

    Raises:
        ValueError: the variable names a level that this CPU does not have.

    Example:
        >>> torch_nhwc.cpu_capability() in ("baseline", "avx2", "avx512", "avx512_vbmi", "neon")
        True
    """
    return cast(str, torch.ops.nhwc.cpu_capability())


def _as_list(
    function: str, weights: Sequence[Tensor], memory_format: torch.memory_format | None = None
) -> list[Tensor]:
    # A tensor is a sequence too: of its filters, which nobody means. So are some modules: of their children.
    if isinstance(weights, Tensor):
        raise TypeError(f"{function}: expected a list of weights, got one tensor of shape {tuple(weights.shape)}")
    if isinstance(weights, torch.nn.Module):
        raise TypeError(f"{function}: expected a list of weights, got a module: use convert_")
    _expect(function, memory_format)
    return list(weights)


def _expect(function: str, memory_format: object, *weights: object) -> None:
    """Says in Python's words what the operators would say in those of their bindings."""
    # A number that is no format would be taken for one, and its name looked up beyond the end of the list of names.
    is_format = memory_format is None or isinstance(memory_format, torch.memory_format)
    if not is_format and not _is_stand_in(memory_format):
        raise TypeError(
            f"{function}: expected memory_format to be a torch.memory_format, got {memory_format!r}"
        ) from None
    for weight in weights:
        if not isinstance(weight, Tensor) and not _is_stand_in(weight):
            raise TypeError(f"{function}: expected a weight to be a tensor, got {type(weight).__name__}") from None


def _is_stand_in(value: object) -> bool:
    """Whether a tracer's proxy stands for something, which may be a weight or a memory format."""
    return hasattr(type(value), "__torch_function__") and not isinstance(value, Tensor)


def _outside_of_graphs(function: _F) -> _F:
    # torch.compiler.disable means the same, but imports the whole compiler, which takes a second. Until somebody else
    # has imported it there is nothing to be outside of.
    from torch._compile import _disable_dynamo

    disabled = _disable_dynamo(function)

    @functools.wraps(function)
    def outside(*args: object, **kwargs: object) -> object:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return cast(_F, outside)


@_outside_of_graphs
def convert_weight_(
    weight: Tensor, memory_format: torch.memory_format | None = None, *, storage: Storage = "auto"
) -> Outcome:
    """Brings a weight into a memory format by `.data` replacement: `convert_weights_` for one weight.

    Example:
        >>> weight = torch.nn.Parameter(torch.randn(8, 3, 3, 3))
        >>> torch_nhwc.convert_weight_(weight), weight.stride()
        (<Outcome.REUSED: 2>, (27, 1, 9, 3))
    """
    _expect("convert_weight_", memory_format, weight)
    return Outcome(torch.ops.nhwc.convert_weight_(weight, memory_format, storage=storage))


@_outside_of_graphs
def convert_weights_(
    weights: Sequence[Tensor], memory_format: torch.memory_format | None = None, *, storage: Storage = "auto"
) -> list[Outcome]:
    """Brings weights into a memory format by `.data` replacement, all or nothing.

    The tensor objects, their autograd identity and hooks, and their values stay. Nothing happens to a weight that has
    the canonical strides already. `.grad` follows its weight, as under `"auto"`; that of a weight in format joins it
    where it can. Weights that are exact aliases of each other stay aliases. If memory runs out, every weight has its
    values and strides as before, some of them in new storage: of CPU weights that need new storage, 8 MB or one weight
    at a time are converted and give their old storage back, where nothing else holds it. A CUDA device does all of its
    weights in one launch, or few, on its current stream; if it fails in the middle of permuting bytes, its weights are
    lost, and all others keep their values.

    As with every replacement of `.data`, no other thread may use the weights during the call, and a DLPack export of
    the weight itself (not of its `detach()`, which holds the storage) is invalid afterwards.

    Args:
        weights: leaves of the autograd graph, 4D and 5D mixed.
        memory_format: `torch.contiguous_format`, or channels-last of the weights' rank; by default of each one's.
        storage: `"auto"` permutes the bytes in place where nothing else can see them and makes new storage elsewhere;
            `"fresh"` always makes new storage, pinned where it was pinned; `"reuse"` permutes in place or raises;
            `"detach"` is `"auto"`, except that a weight that is part of a larger storage leaves it for new storage.

    Returns:
        What was done to each weight, in order.

    Raises:
        RuntimeError: before anything is touched, for a weight that is not a leaf; that is traced, fake, functional or a
            tensor subclass, or a lazy conjugate or negative view; whose gradient accumulator has post hooks (DDP,
            FSDP1: convert first, then wrap); that is part of a larger storage, under `"auto"` and `"reuse"`; whose
            gradient cannot follow; whose storage is released; for `"reuse"` where it is not safe; for a wrong rank or
            format; while a CUDA graph is captured on the weight's device.
        NotImplementedError: for a weight that is sparse, quantized, nested or of another layout that is not strided.
        TypeError: `weights` is one tensor or a module; `memory_format` is not a `torch.memory_format`.
        ValueError: `storage` is none of the four.

    Example:
        >>> torch_nhwc.convert_weights_([torch.randn(8, 3, 3, 3), torch.randn(8, 1, 3, 3)])
        [<Outcome.REUSED: 2>, <Outcome.RESTRIDED: 1>]
    """
    listed = _as_list("convert_weights_", weights, memory_format)
    outcomes = torch.ops.nhwc.convert_weights_(listed, memory_format, storage=storage)
    return [_OUTCOMES[outcome] for outcome in outcomes]


@_outside_of_graphs
def lay_out_weights_(
    weights: Sequence[Tensor], strides: Sequence[Sequence[int]], *, storage: Storage = "auto"
) -> list[Outcome]:
    """Brings tensors of any rank into any strides by `.data` replacement, by the rules of `convert_weights_`.

    What undoes a conversion, and what lays out optimizer state as its weight lies. A tensor's `.grad` follows it,
    unless it is in the list itself.

    Args:
        weights: leaves of the autograd graph.
        strides: of each weight, one for each of its dimensions.
        storage: `"auto"`, `"fresh"`, `"reuse"` or `"detach"`, as `convert_weights_` has it.

    Raises:
        RuntimeError: for another number of strides, for strides by which elements overlap, and where
            `convert_weights_` raises, as the other errors are.

    Example:
        >>> weight = torch.randn(8, 3, 3, 3)
        >>> torch_nhwc.lay_out_weights_([weight], [(1, 72, 24, 8)]), weight.stride()
        ([<Outcome.REUSED: 2>], (1, 72, 24, 8))
    """
    flat = [stride for each in strides for stride in each]
    outcomes = torch.ops.nhwc.lay_out_weights_(_as_list("lay_out_weights_", weights), flat, storage=storage)
    return [_OUTCOMES[outcome] for outcome in outcomes]


@_outside_of_graphs
def plan_weights(
    weights: Sequence[Tensor], memory_format: torch.memory_format | None = None, *, storage: Storage = "auto"
) -> list[Outcome]:
    """Says what `convert_weights_` with the same arguments would do to each weight, refusals included.

    Changes nothing, and leaves no reference to any storage behind.

    Example:
        >>> weight = torch.randn(8, 3, 3, 3, requires_grad=True)
        >>> torch_nhwc.plan_weights([weight, weight * 2])
        [<Outcome.REUSED: 2>, <Outcome.NOT_A_LEAF: -1>]
    """
    listed = _as_list("plan_weights", weights, memory_format)
    # In inference mode a tensor subclass would be asked instead of refused. To leave it when not in it takes long.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        outcomes = torch.ops.nhwc.plan_weights(listed, memory_format, storage=storage)
    return [_OUTCOMES[outcome] for outcome in outcomes]


def differing_layouts(weights: Sequence[Tensor], companions: Sequence[Tensor]) -> list[int]:
    """The indices of the companions that do not lie as the weight with the same index; `ops.h` has the contract."""
    return cast(list[int], torch.ops.nhwc.differing_layouts(weights, companions))


def sentence(reason: str) -> str:
    """The sentence of a reason that C++ gives as well, by its name."""
    return cast(str, torch.ops.nhwc.sentence(reason))
