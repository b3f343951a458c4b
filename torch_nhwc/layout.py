"""Memory formats and strides, the conversion of a tensor to a format, and which tensors share memory."""

from collections.abc import Callable, Container, Iterable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting

Strides = tuple[int, ...]

# The channels-last format of a rank.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_RANKS = {"contiguous_format": (4, 5), "channels_last": (4,), "channels_last_3d": (5,)}


class Format(NamedTuple):
    """A memory format of weights."""

    name: str | None
    """As PyTorch calls it, without `torch.`; `None` is channels-last of each weight's rank."""

    @classmethod
    def of(cls, memory_format: torch.memory_format | str | None) -> "Format":
        """Return the format that a caller means.

        Raises:
            ValueError: it is none of the four.
        """
        if memory_format is None:
            return cls(None)
        is_named = isinstance(memory_format, (str, torch.memory_format))
        name = str(memory_format).removeprefix("torch.") if is_named else ""
        if name not in _RANKS:
            other = f"{type(memory_format).__name__} (give optimizers and others by name)"
            got = repr(memory_format) if name else other
            raise ValueError(f"expected memory_format to be None or one of {', '.join(_RANKS)}, got {got}")
        return cls(name)

    @property
    def is_channels_last(self) -> bool:
        """Return whether it is a channels-last format, of any rank."""
        return self.name != "contiguous_format"

    @property
    def for_operators(self) -> torch.memory_format | None:
        """The argument for the operators, to which `None` is channels-last of each weight's rank."""
        return None if self.is_channels_last else torch.contiguous_format

    def serves(self, rank: int) -> bool:
        """Return whether weights of a rank can have it."""
        return self.name is None or rank in _RANKS[self.name]

    def name_at(self, rank: int) -> str:
        """Return its name for weights of a rank."""
        return self.name or str(CHANNELS_LAST[rank]).removeprefix("torch.")

    def of_filters(self, channels: int, groups: int) -> "Format":
        """Return the format for a convolution's filters: contiguous where those of one group have one channel.

        PyTorch computes some of those wrong on channels-last (h42 in docs/hazards.md), and the bytes are the same.
        """
        return CONTIGUOUS if channels == 1 and groups == 1 else self

    def strides(self, shape: torch.Size) -> Strides:
        """Return the canonical strides: those that `torch.empty` gives a tensor of the shape in this format."""
        if torch.compiler.is_compiling() or torch._C._is_tracing():  # sizes may be symbols, or tensors
            return _canonical_strides(shape, self.is_channels_last)
        return _remembered_strides(shape, self.is_channels_last)


def _canonical_strides(shape: torch.Size, channels_last: bool) -> Strides:
    """Compute strides without an operator, which the modes of a trace or a checkpoint would see."""
    is_channels_last = channels_last and len(shape) in CHANNELS_LAST
    if any(isinstance(size, Tensor) for size in shape):  # in torch.jit.trace
        memory_format = CHANNELS_LAST[len(shape)] if is_channels_last else torch.contiguous_format
        return torch.empty(shape, device="meta", memory_format=memory_format).stride()
    dims = [*range(len(shape))]
    if is_channels_last:
        dims.append(dims.pop(1))
    strides = dims.copy()
    stride = 1
    for dim in reversed(dims):
        strides[dim] = stride
        stride *= shape[dim] if is_channels_last else torch.sym_max(shape[dim], 1)  # type: ignore[no-untyped-call]
    return tuple(strides)


known_strides = lru_cache(4096)(_canonical_strides)  # a model has many weights of few shapes
CONTIGUOUS = Format("contiguous_format")


def _remembered_strides(shape: torch.Size, channels_last: bool) -> Strides:
    try:
        return known_strides(shape, channels_last)
    except TypeError:  # symbolic sizes have no hash
        return _canonical_strides(shape, channels_last)


def to_format(tensor: Tensor, channels_last: bool = True) -> Tensor:
    """Return a 4D or 5D tensor in channels-last, or contiguous, in canonical strides: itself where it has them.

    Bytes move only where they have to. Transforms, tracers, compilers and TorchScript may run it.

    Example:
        >>> torch_nhwc.layout.to_format(torch.ones(1, 2, 1, 3)).stride()
        (6, 1, 6, 2)
    """
    if not is_scripting():
        result = _by_memory_format(tensor, channels_last)
        if result is not None:
            return result
    dense = tensor.movedim(1, -1).contiguous() if channels_last else tensor.contiguous()
    dense = dense.flatten().view(dense.shape)  # which gives dimensions of size 1 their canonical strides
    return dense.movedim(-1, 1) if channels_last else dense


def _by_memory_format(tensor: Tensor, channels_last: bool) -> Tensor | None:
    """Return a tensor in format by PyTorch's own operator, which exporters and subclasses know best.

    `None` where it does not serve: transforms know one memory format only, to tracers sizes are tensors, and it leaves
    dimensions of size 1 in other strides where it has nothing to move.
    """
    is_compiled = torch.compiler.is_compiling()
    if torch._C._are_functorch_transforms_active() or (not is_compiled and torch._C._is_tracing()):
        return None
    memory_format = CHANNELS_LAST[tensor.dim()] if channels_last else torch.contiguous_format
    if is_compiled:
        return None if 1 in tensor.shape else tensor.contiguous(memory_format=memory_format)
    strides = _remembered_strides(tensor.shape, channels_last)
    if tensor.stride() == strides:
        return tensor
    if tensor.numel() <= 1:
        return tensor.as_strided(tensor.shape, strides)
    dense = tensor.contiguous(memory_format=memory_format)
    return dense if dense.stride() == strides else None


def is_convertible(tensor: Tensor, ranks: list[int]) -> bool:
    """Return whether a tensor has one of these ranks, and elements of its own whose order can change."""
    if tensor.dim() not in ranks or tensor.layout != torch.strided or tensor.is_nested:
        return False
    strides = tensor.stride()
    if 0 not in strides:
        return True
    for dim, stride in enumerate(strides):  # noqa: SIM110  TorchScript knows no `all`
        if stride == 0 and tensor.size(dim) > 1:
            return False
    return True


def is_permuted(shape: torch.Size, strides: Strides) -> bool:
    """Return whether strides put the elements of a tensor in another order than contiguous ones do."""
    return any(size > 1 and own != other for size, own, other in zip(shape, strides, CONTIGUOUS.strides(shape)))


def has_strides(tensor: Tensor, strides: Strides) -> bool:
    """Return whether a tensor has these strides, in all dimensions of more than one element."""
    if tensor.layout != torch.strided:  # a sparse gradient has no layout to share
        return True
    return all(size <= 1 or own == other for size, own, other in zip(tensor.shape, tensor.stride(), strides))


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is a FakeTensor: by the name of its class, whose module may not be loaded."""
    return "FakeTensor" in (type(tensor).__name__, type(tensor.data).__name__)


def memory_id(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that begin at one place in memory; `id` where there is no memory."""
    return (tensor.data_ptr() if _has_memory(tensor) else 0) or id(tensor)


def _has_memory(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta


def tied_by_view(tensors: Iterable[Tensor | None], weights: Iterable[Tensor | None]) -> set[int]:
    """Return the ids of the tensors that would be separated from others if the weights got new memory.

    Those are tensors that overlap in memory, unless all of them are weights and exact aliases of each other.
    """
    known = {id(weight): weight for weight in weights if weight is not None}
    spans = []
    for tensor in {id(each): each for each in (*tensors, *known.values()) if each is not None}.values():
        if type(tensor) is nn.Parameter or type(tensor) is Tensor:
            try:
                start = tensor.data_ptr()
            except RuntimeError:  # a sparse tensor or a transform's, which have no memory
                continue
            if start:
                size = tensor.nbytes if tensor.is_contiguous() else _span(tensor)
                spans.append((start, start + size, tensor))
    spans.sort(key=itemgetter(0))
    tied: set[int] = set()
    first = end = 0  # of the present group, whose tensors overlap, directly or through others
    for index, (start, stop, _) in enumerate(spans):
        if start >= end:
            tied |= _tied_in(spans[first:index], known) if index - first > 1 else set()
            first = index
        if stop > end:
            end = stop
    return tied | _tied_in(spans[first:], known)


def _tied_in(group: Sequence[tuple[int, int, Tensor]], known: Container[int]) -> set[int]:
    """Return the ids of tensors that overlap, unless all are exact aliases of each other and known."""
    ids = {id(tensor) for _, _, tensor in group}
    are_aliases = len({_alias_key(tensor) for _, _, tensor in group}) <= 1
    return set() if len(ids) == 1 or (are_aliases and all(each in known for each in ids)) else ids


def _alias_key(tensor: Tensor) -> tuple[object, ...]:
    """Return what is equal for exact aliases, whatever their strides are in dimensions of size 1."""
    strides = tuple(stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1)
    return tensor.data_ptr(), tensor.shape, strides, tensor.dtype


def _span(tensor: Tensor) -> int:
    """Return the bytes from the beginning of a tensor's first element to the end of its last one."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def contiguous_copies() -> Callable[[Tensor], Tensor]:
    """Return a function that makes tensors contiguous: one that is stays itself, and exact aliases stay aliases."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def contiguous(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or tensor.is_contiguous():
            return tensor
        key = tensor.device, memory_id(tensor), tensor.shape, tensor.stride(), tensor.dtype
        if key not in copies:
            copies[key] = tensor.detach().clone(memory_format=torch.contiguous_format)
        return copies[key]

    return contiguous
