"""The operators of `torch.ops.nhwc`, typed and documented, and the library that holds them.

The functions add types to `torch.ops.nhwc.*`, which TorchScript calls itself, and a graph break of `torch.compile`
around the in-place operators.
"""

import enum
import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from torch_nhwc.ops import library, sharding
from torch_nhwc.ops.qualification import qualify_norms

__all__ = [
    "Outcome",
    "Storage",
    "convert_weight",
    "convert_weight_",
    "convert_weights",
    "convert_weights_",
    "copy_weight_",
    "cpu_capability",
    "mismatched_layouts",
    "plan_weights",
    "qualify_norms",
    "runs_cuda_norms",
    "sentence",
    "set_strides_",
]

library.load()
sharding.register_when_imported()

Storage = Literal["auto", "fresh", "reuse", "detach"]


class Outcome(enum.IntEnum):
    """The result of an in-place conversion for one weight, or its forecast.

    Negative outcomes are refusals. Only `plan_weights` returns them: the converting operators raise.

    Example:
        >>> torch_nhwc.convert_weight_(torch.randn(8, 3, 3, 3)) is torch_nhwc.Outcome.IN_PLACE
        True
    """

    UNCHANGED = 0
    """The weight was in format already."""
    RESTRIDED = 1
    """The bytes were in order: only the strides changed."""
    IN_PLACE = 2
    """The bytes were permuted in their own storage."""
    COPIED = 3
    """New storage."""
    COPIED_HELD = 4
    """New storage, because something else holds the old one."""
    COPIED_FOREIGN = 5
    """New storage, because the memory is not from the device's own allocator."""
    COPIED_SHARED = 6
    """New storage, because the memory is shared between processes."""

    NOT_A_LEAF = -1
    """The weight is computed from other tensors."""
    TRACED = -2
    """The weight is traced, fake, functional or a tensor subclass, or a tracer is active."""
    WRAPPED = -3
    """The gradient accumulator has post hooks: DDP or FSDP1 wrapped the model first."""
    PART_OF_LARGER_STORAGE = -4
    """The weight is a view, or a slice of a flat parameter buffer."""
    GRADIENT_IN_THE_WAY = -5
    """The gradient cannot follow the weight."""
    LAZY_VIEW = -6
    """The weight is an unresolved conjugate or negative view."""
    HELD = -7
    """Under `"reuse"`, where `"auto"` gives `COPIED_HELD`."""
    FOREIGN = -8
    """Under `"reuse"`, where `"auto"` gives `COPIED_FOREIGN`."""
    SHARED = -9
    """Under `"reuse"`, where `"auto"` gives `COPIED_SHARED`."""
    NOT_PERMUTABLE = -10
    """Under `"reuse"`: the strides are not dense, or the device has no in-place kernel."""

    @property
    def is_refusal(self) -> bool:
        """Return whether the converting operators raise."""
        return self < 0


_OUTCOMES = {int(outcome): outcome for outcome in Outcome}  # faster than the enumeration itself, for long lists
_F = TypeVar("_F", bound=Callable[..., object])

# PyTorch looks for a `__torch_function__` in every memory format that an operator is given, which takes as long as the
# conversion of a small weight. It does not look into the number of the format. What overrides the operator (a tracer, a
# mode, a subclass) therefore sees the number.
_NUMBERS: dict[object, object] = {
    None: None,
    torch.contiguous_format: 0,
    torch.preserve_format: 1,  # which the operator refuses
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
# The formats by their names, with and without `torch.`.
_BY_NAME = {str(each): each for each in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)}
_BY_NAME |= {name.removeprefix("torch."): each for name, each in _BY_NAME.items()}
_NUMBERS |= {name: _NUMBERS[each] for name, each in _BY_NAME.items()}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_convert_weight = torch.ops.nhwc.convert_weight.default


def named_format(given: Any) -> Any:
    """Return the memory format with a name, such as `"channels_last"`; anything else as it is."""
    return _BY_NAME.get(given, given) if isinstance(given, str) else given


def named_dtype(given: Any) -> Any:
    """Return the dtype with a name, such as `"bfloat16"` or `"bf16"`; anything else as it is."""
    name = given.lower().removeprefix("torch.") if isinstance(given, str) else ""
    found = getattr(torch, _SHORT.get(name, name), None)
    return found if isinstance(found, torch.dtype) else given


def convert_weight(
    weight: Tensor, memory_format: torch.memory_format | str | None = None, *, dtype: torch.dtype | str | None = None
) -> Tensor:
    """Clone a weight into a memory format, with an optional cast, in one pass over its bytes.

    Args:
        weight: `[O, I, *kernel]`, 4D or 5D, of any strides, dtype and device.
        memory_format: `torch.contiguous_format`, or channels-last of the weight's rank, which is the default; or its
            name.
        dtype: The dtype to cast to in the same pass, or its name; between floating-point types only.

    Returns:
        A tensor with its own memory and the strides of `torch.empty(weight.shape, memory_format=memory_format)`.
        It is differentiable any number of times, in reverse and forward mode. The gradient has the weight's dtype and
        memory format, and is contiguous where the weight has none.

    Raises:
        RuntimeError: The weight is not 4D or 5D, or the format is not one of its rank.
        NotImplementedError: The weight is sparse, quantized, nested, or not strided for another reason.
        TypeError: The cast is not between floating-point types; or `weight` is not a tensor, `memory_format` not a
            memory format or `dtype` not a dtype, nor the name of one.

    Example:
        >>> torch_nhwc.convert_weight(torch.randn(8, 3, 3, 3), dtype=torch.bfloat16).stride()
        (27, 1, 9, 3)
    """
    try:
        number = _NUMBERS[memory_format]
    except (KeyError, TypeError):  # other values may have no hash either
        _check_arguments("convert_weight", memory_format, weight)
        number = memory_format
    try:
        if dtype is None:
            converted: Tensor = _convert_weight(weight, number)
        else:
            converted = _convert_weight(weight, number, dtype=named_dtype(dtype))
    except RuntimeError:  # a check before the call would take a tenth of its time
        _check_arguments("convert_weight", memory_format, weight)
        _check_dtype("convert_weight", dtype)
        raise
    return converted


def convert_weights(
    weights: Sequence[Tensor],
    memory_format: torch.memory_format | str | None = None,
    *,
    dtype: torch.dtype | str | None = None,
) -> list[Tensor]:
    """Clone each weight of a list as `convert_weight` does; ranks, dtypes and devices may be mixed.

    Raises:
        TypeError: `weights` is one tensor or a module; or as `convert_weight`, like the other errors.

    Example:
        >>> [each.stride() for each in torch_nhwc.convert_weights([torch.ones(8, 3, 3, 3), torch.ones(8, 3, 1, 3, 3)])]
        [(27, 1, 9, 3), (27, 1, 27, 9, 3)]
    """
    weights = _as_list("convert_weights", weights, memory_format)
    _check_dtype("convert_weights", dtype)
    return torch.ops.nhwc.convert_weights(weights, named_format(memory_format), dtype=named_dtype(dtype))


def copy_weight_(out: Tensor, weight: Tensor) -> Tensor:
    """Copy the values of a weight into existing memory, as `out.copy_(weight)` does.

    Use it for weights that are converted again and again: the pages of the buffer are resident. Only values are copied,
    so call it under `torch.no_grad()`, or with tensors that need no gradient.

    Args:
        out: A tensor of the weight's shape and device, in the canonical strides of `torch.contiguous_format` or of
            channels-last. Values are cast to its dtype. It must not overlap the weight.
        weight: `[O, I, *kernel]`, 4D or 5D, of any strides and dtype.

    Returns:
        `out`.

    Raises:
        RuntimeError: `out` has another shape, device or strides, it overlaps the weight, or a gradient is needed.
        TypeError: The cast is not between floating-point types; `out` or `weight` is not a tensor.

    Example:
        >>> weight = torch.randn(8, 3, 3, 3)
        >>> buffer = torch.empty(8, 3, 3, 3, memory_format=torch.channels_last)
        >>> torch.equal(torch_nhwc.ops.copy_weight_(buffer, weight), weight)
        True
    """
    _check_arguments("copy_weight_", None, out, weight)
    torch.ops.nhwc.copy_weight_(out, weight)
    return out


def cpu_capability() -> str:
    """Return the instruction set of the CPU kernels: the best one of this CPU, chosen once.

    One of `"baseline"`, `"avx2"`, `"avx2_128"`, `"avx512"`, `"avx512_vbmi"` and `"neon"`. The environment variable
    `TORCH_NHWC_CPU_CAPABILITY` chooses another; without it, PyTorch's `ATEN_CPU_CAPABILITY` is an upper bound.

    Raises:
        ValueError: The variable names an instruction set that this CPU does not have.

    Example:
        >>> torch_nhwc.ops.cpu_capability() in ("baseline", "avx2", "avx2_128", "avx512", "avx512_vbmi", "neon")
        True
    """
    return torch.ops.nhwc.cpu_capability()


def runs_cuda_norms(device: torch.device | str = "cuda") -> bool:
    """Return whether norms in channels-last run on kernels of this library on a GPU.

    They do where `qualify_norms` found them right and faster; until it is called, on GPUs of compute capability 9.0,
    such as H100 and H200. The environment variable `TORCH_NHWC_CUDA_NORMS` decides otherwise: 1 is yes for all, 0 is
    no.

    Raises:
        ValueError: The variable has another value.

    Example:
        >>> torch_nhwc.ops.runs_cuda_norms("cpu")
        False
    """
    return torch.ops.nhwc.runs_cuda_norms(torch.device(device))


def _as_list(
    function: str, weights: Sequence[Tensor], memory_format: torch.memory_format | str | None = None
) -> list[Tensor]:
    # A tensor is a sequence of its filters, and some modules are sequences of their children: neither is meant.
    if isinstance(weights, Tensor):
        raise TypeError(f"{function}: expected a list of weights, got one tensor of shape {tuple(weights.shape)}")
    if isinstance(weights, torch.nn.Module):
        raise TypeError(f"{function}: expected a list of weights, got a module: use convert_")
    _check_arguments(function, memory_format)
    return list(weights)


def _check_arguments(function: str, memory_format: object, *weights: object) -> None:
    """Raise a TypeError in Python's words, where PyTorch's bindings would use their own."""
    # A number that is no format would be taken for one, and its name looked up beyond the end of the list of names.
    is_format = memory_format is None or isinstance(named_format(memory_format), torch.memory_format)
    if not is_format and not _is_proxy(memory_format):
        raise TypeError(
            f"{function}: expected memory_format to be a torch.memory_format or its name, got {memory_format!r}"
        ) from None
    for weight in weights:
        if not isinstance(weight, Tensor) and not _is_proxy(weight):
            raise TypeError(f"{function}: expected a weight to be a tensor, got {type(weight).__name__}") from None


def _check_dtype(function: str, dtype: object) -> None:
    if dtype is not None and not isinstance(named_dtype(dtype), torch.dtype) and not _is_proxy(dtype):
        raise TypeError(f"{function}: expected dtype to be a torch.dtype or its name, got {dtype!r}") from None


def _is_proxy(value: object) -> bool:
    """Return whether a value is a tracer's proxy, which may represent a weight or a memory format."""
    return hasattr(type(value), "__torch_function__") and not isinstance(value, Tensor)


def _outside_of_graphs(function: _F) -> _F:
    # torch.compiler.disable does the same, but it imports the whole compiler, which takes a second. While nobody else
    # has imported the compiler, there is no graph to be outside of.
    from torch._compile import _disable_dynamo

    disabled = _disable_dynamo(function)

    @functools.wraps(function)
    def outside(*args: object, **kwargs: object) -> object:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return cast(_F, outside)


@_outside_of_graphs
def convert_weight_(
    weight: Tensor, memory_format: torch.memory_format | str | None = None, *, storage: Storage = "auto"
) -> Outcome:
    """Convert a weight to a memory format by `.data` replacement, as `convert_weights_` does for a list.

    Example:
        >>> weight = torch.nn.Parameter(torch.randn(8, 3, 3, 3))
        >>> torch_nhwc.convert_weight_(weight), weight.stride()
        (<Outcome.IN_PLACE: 2>, (27, 1, 9, 3))
    """
    _check_arguments("convert_weight_", memory_format, weight)
    return Outcome(torch.ops.nhwc.convert_weight_(weight, named_format(memory_format), storage=storage))


@_outside_of_graphs
def convert_weights_(
    weights: Sequence[Tensor], memory_format: torch.memory_format | str | None = None, *, storage: Storage = "auto"
) -> list[Outcome]:
    """Convert weights to a memory format by `.data` replacement, all or nothing.

    The tensor objects, their autograd identity, hooks and values stay. A weight in canonical strides is unchanged.
    `.grad` follows its weight, as under `"auto"`; the gradient of a weight in format joins it where it can. Weights
    that are exact aliases of each other stay aliases. If memory runs out, every weight has its values and strides as
    before, some of them in new storage: CPU weights that need new storage are converted 8 MB or one weight at a time,
    and release their old storage where nothing else holds it. A CUDA device converts all of its weights in one launch,
    or few, on its current stream. If it fails while it permutes bytes, its weights are lost, and all others keep their
    values.

    As with every replacement of `.data`, no other thread may use the weights during the call, and a DLPack export of
    the weight itself (not of its `detach()`, which holds the storage) is invalid afterwards.

    Args:
        weights: Leaves of the autograd graph, 4D and 5D mixed.
        memory_format: `torch.contiguous_format`, or channels-last of the weights' rank; by default of each one's. Its
            name means the same.
        storage: `"auto"` permutes the bytes in place where nothing else can see them, and allocates new storage
            elsewhere; `"fresh"` always allocates new storage, pinned where it was pinned; `"reuse"` permutes in place
            or raises; `"detach"` is `"auto"`, except that a weight that is part of a larger storage leaves it for new
            storage.

    Returns:
        The outcome for each weight, in order.

    Raises:
        RuntimeError: Before anything changes, for a weight that is not a leaf; that is traced, fake, functional, a
            tensor subclass, or a lazy conjugate or negative view; whose gradient accumulator has post hooks (DDP,
            FSDP1: convert first, then wrap); that is part of a larger storage, under `"auto"` and `"reuse"`; whose
            gradient cannot follow; whose storage is released; for `"reuse"` where it is not safe; for a wrong rank or
            format; while a CUDA graph is captured on the weight's device.
        NotImplementedError: A weight is sparse, quantized, nested, or not strided for another reason.
        TypeError: `weights` is one tensor or a module; `memory_format` is neither a `torch.memory_format` nor the name
            of one.
        ValueError: `storage` is none of the four.

    Example:
        >>> torch_nhwc.convert_weights_([torch.randn(8, 3, 3, 3), torch.randn(8, 1, 3, 3)])
        [<Outcome.IN_PLACE: 2>, <Outcome.RESTRIDED: 1>]
    """
    listed = _as_list("convert_weights_", weights, memory_format)
    outcomes = torch.ops.nhwc.convert_weights_(listed, named_format(memory_format), storage=storage)
    return [_OUTCOMES[outcome] for outcome in outcomes]


@_outside_of_graphs
def set_strides_(
    weights: Sequence[Tensor], strides: Sequence[Sequence[int]], *, storage: Storage = "auto"
) -> list[Outcome]:
    """Give tensors of any rank any strides by `.data` replacement, by the rules of `convert_weights_`.

    This undoes a conversion, and gives optimizer state the strides of its weight. A tensor's `.grad` follows it, unless
    the list contains the gradient itself.

    Args:
        weights: Leaves of the autograd graph.
        strides: The strides of each weight, one for each of its dimensions.
        storage: `"auto"`, `"fresh"`, `"reuse"` or `"detach"`, as for `convert_weights_`.

    Raises:
        RuntimeError: The number of strides is wrong, or elements would overlap; or as `convert_weights_`, like the
            other errors.

    Example:
        >>> weight = torch.randn(8, 3, 3, 3)
        >>> torch_nhwc.ops.set_strides_([weight], [(1, 72, 24, 8)]), weight.stride()
        ([<Outcome.IN_PLACE: 2>], (1, 72, 24, 8))
    """
    flat = [stride for each in strides for stride in each]
    outcomes = torch.ops.nhwc.set_strides_(_as_list("set_strides_", weights), flat, storage=storage)
    return [_OUTCOMES[outcome] for outcome in outcomes]


@_outside_of_graphs
def plan_weights(
    weights: Sequence[Tensor], memory_format: torch.memory_format | str | None = None, *, storage: Storage = "auto"
) -> list[Outcome]:
    """Return what `convert_weights_` with the same arguments would do to each weight, refusals included.

    Nothing changes, and no reference to any storage is left.

    Example:
        >>> weight = torch.randn(8, 3, 3, 3, requires_grad=True)
        >>> torch_nhwc.ops.plan_weights([weight, weight * 2])
        [<Outcome.IN_PLACE: 2>, <Outcome.NOT_A_LEAF: -1>]
    """
    listed = _as_list("plan_weights", weights, memory_format)
    # In inference mode PyTorch would call a tensor subclass instead of refusing it. Leaving the mode takes long.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        outcomes = torch.ops.nhwc.plan_weights(listed, named_format(memory_format), storage=storage)
    return [_OUTCOMES[outcome] for outcome in outcomes]


def mismatched_layouts(weights: Sequence[Tensor], companions: Sequence[Tensor]) -> list[int]:
    """Return the indices of the companions whose layout is not that of the weight with the same index.

    Companions are gradients and optimizer state. Strides of dimensions of size 1 do not count, and a companion of
    another shape, or without strides, is passed over.

    Raises:
        RuntimeError: There is not one weight for each companion.

    Example:
        >>> weight = torch.randn(8, 3, 3, 3).to(memory_format=torch.channels_last)
        >>> torch_nhwc.ops.mismatched_layouts([weight, weight], [torch.zeros_like(weight), torch.zeros(8, 3, 3, 3)])
        [1]
    """
    return torch.ops.nhwc.mismatched_layouts(weights, companions)


def sentence(reason: str) -> str:
    """Return the sentence of a reason, which C++ and Python share, by the reason's name.

    Raises:
        ValueError: There is no such reason.

    Example:
        >>> torch_nhwc.ops.sentence("UNDEFINED")
        'the layer has no weight'
    """
    return torch.ops.nhwc.sentence(reason)
