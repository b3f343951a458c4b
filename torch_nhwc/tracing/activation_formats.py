"""The memory format of an activation, by its strides."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from torch_nhwc.layout import CHANNELS_LAST

CONTIGUOUS, AMBIGUOUS, OTHER = "contiguous", "ambiguous", "other"
_NAMES = {rank: str(memory_format).removeprefix("torch.") for rank, memory_format in CHANNELS_LAST.items()}
_RANKS = {name: rank for rank, name in _NAMES.items()}
CHANNELS_LAST_NAMES = frozenset(_RANKS)
# Dimensions from the innermost to the outermost.
_CONTIGUOUS_ORDERS = {rank: tuple(reversed(range(rank))) for rank in CHANNELS_LAST}
_CHANNELS_LAST_ORDERS = {rank: (1, *range(rank - 1, 1, -1), 0) for rank in CHANNELS_LAST}


class Layout(NamedTuple):
    """The format and the shape of an activation with 4 or 5 dimensions, or of one image or volume of a batch.

    The format is `contiguous`, `channels_last` or `channels_last_3d`; `ambiguous` if both fit, as with one channel or
    one voxel; `other` if neither fits. An image that is taken out of a batch, as by `x[0]`, has the batch's format.
    """

    format: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.format} {'x'.join(map(str, self.shape))}"


def layouts_of(tensors: Iterable[Tensor]) -> tuple[Layout, ...]:
    """Return the layouts of the tensors that have a format."""
    named = ((format_of(tensor), tensor) for tensor in tensors)
    return tuple(Layout(name, tuple(tensor.shape)) for name, tensor in named if name is not None)


def is_channels_last(name: str | None) -> bool:
    """Return whether a format is channels-last, of any rank, and not ambiguous."""
    return name in CHANNELS_LAST_NAMES


def is_channels_last_like(name: str | None, tensor: Tensor) -> bool:
    """Return whether a format is channels-last of the rank of a tensor, or of the batch that it is a view of."""
    rank = _RANKS.get(name or "")
    return rank == tensor.dim() or (rank == tensor.dim() + 1 and _format_of_batch(tensor) is not None)


def format_of(tensor: Tensor) -> str | None:
    """Return the format of a tensor, or `None` if it has another rank or no strides."""
    rank = tensor.dim()
    if rank not in CHANNELS_LAST:
        return _format_of_batch(tensor) if rank == 3 else None
    try:
        is_contiguous = tensor.is_contiguous()
        if tensor.is_contiguous(memory_format=CHANNELS_LAST[rank]):
            return AMBIGUOUS if is_contiguous else _NAMES[rank]
        name = CONTIGUOUS if is_contiguous else format_of_strides(tensor.shape, tensor.stride())
    except RuntimeError:  # sparse and nested tensors
        return None
    return (name == OTHER and _format_of_batch(tensor)) or name


def format_of_strides(shape: Sequence[int], strides: Sequence[int]) -> str:
    """Return the format of a tensor with 4 or 5 dimensions, which may be a slice of a larger one."""
    rank = len(shape)
    is_channels_last = _are_nested(shape, strides, _CHANNELS_LAST_ORDERS[rank])
    if _are_nested(shape, strides, _CONTIGUOUS_ORDERS[rank]):
        return AMBIGUOUS if is_channels_last else CONTIGUOUS
    return _NAMES[rank] if is_channels_last else OTHER


def _format_of_batch(tensor: Tensor) -> str | None:
    """Return the format of the batch of which a tensor is one image or volume, or `None` if it is not."""
    base, rank = tensor._base, tensor.dim() + 1
    if base is None or base.dim() != rank or rank not in CHANNELS_LAST:
        return None
    return format_of_strides((1, *tensor.shape), (0, *tensor.stride()))


def _are_nested(shape: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    """Return whether each dimension in an order steps over all dimensions before it, those of size 1 aside."""
    step = 1
    for dim in order:
        if shape[dim] == 1:
            continue
        if strides[dim] < step:
            return False
        step = strides[dim] * shape[dim]
    return True
