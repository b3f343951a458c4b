"""The memory format of an activation, by its strides."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor

from torch_nhwc.formats import CHANNELS_LAST

CONTIGUOUS, AMBIGUOUS, OTHER = "contiguous", "ambiguous", "other"
_NAMES = {rank: str(memory_format).removeprefix("torch.") for rank, memory_format in CHANNELS_LAST.items()}
_RANKS = {name: rank for rank, name in _NAMES.items()}
CHANNELS_LAST_NAMES = frozenset(_RANKS)
# Dimensions from the innermost to the outermost.
_CONTIGUOUS_ORDERS = {rank: tuple(reversed(range(rank))) for rank in CHANNELS_LAST}
_CHANNELS_LAST_ORDERS = {rank: (1, *range(rank - 1, 1, -1), 0) for rank in CHANNELS_LAST}


class Layout(NamedTuple):
    """The format of a tensor of 4 or 5 dimensions: `contiguous`, `channels_last`, `channels_last_3d`, or neither.

    It is `ambiguous` where both formats fit, as with one channel or one voxel, and `other` where none does. An image or
    a volume that was taken out of a batch, as by `x[0]`, has the format of the batch.
    """

    format: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.format} {'x'.join(map(str, self.shape))}"


def is_channels_last(name: str | None) -> bool:
    """Whether a format is channels-last, of any rank, and no other fits."""
    return name in CHANNELS_LAST_NAMES


def is_channels_last_of(name: str | None, written: Tensor) -> bool:
    """Whether a format is channels-last of the rank of what is written, or of the batch that this is a part of."""
    rank = _RANKS.get(name or "")
    return rank == written.dim() or (rank == written.dim() + 1 and _format_of_batch(written) is not None)


def format_of(tensor: Tensor) -> str | None:
    """The format of a tensor; `None` where it is of another rank, or has no strides."""
    rank = tensor.dim()
    if rank not in CHANNELS_LAST:
        return _format_of_batch(tensor) if rank == 3 else None
    try:
        is_contiguous = tensor.is_contiguous()
        if tensor.is_contiguous(memory_format=CHANNELS_LAST[rank]):
            return AMBIGUOUS if is_contiguous else _NAMES[rank]
        name = CONTIGUOUS if is_contiguous else format_of_strides(tensor.shape, tensor.stride())
    except RuntimeError:  # sparse, nested and such
        return None
    return (name == OTHER and _format_of_batch(tensor)) or name


def _format_of_batch(tensor: Tensor) -> str | None:
    """The format of the batch that an image or a volume is a view of; `None` where a tensor is none such."""
    base, rank = tensor._base, tensor.dim() + 1
    if base is None or base.dim() != rank or rank not in CHANNELS_LAST:
        return None
    return format_of_strides((1, *tensor.shape), (0, *tensor.stride()))


def format_of_strides(shape: Sequence[int], strides: Sequence[int]) -> str:
    """The format of a tensor of 4 or 5 dimensions, which may be a part of a larger one."""
    rank = len(shape)
    is_channels_last = _are_nested(shape, strides, _CHANNELS_LAST_ORDERS[rank])
    if _are_nested(shape, strides, _CONTIGUOUS_ORDERS[rank]):
        return AMBIGUOUS if is_channels_last else CONTIGUOUS
    return _NAMES[rank] if is_channels_last else OTHER


def layouts_of(tensors: Iterable[Tensor]) -> tuple[Layout, ...]:
    """The layouts of those tensors that have one."""
    named = ((format_of(tensor), tensor) for tensor in tensors)
    return tuple(Layout(name, tuple(tensor.shape)) for name, tensor in named if name is not None)


def _are_nested(shape: Sequence[int], strides: Sequence[int], order: Sequence[int]) -> bool:
    """Whether each dimension in an order steps over all of those before it; those of size 1 do not count."""
    step = 1
    for dim in order:
        if shape[dim] == 1:
            continue
        if strides[dim] < step:
            return False
        step = strides[dim] * shape[dim]
    return True
