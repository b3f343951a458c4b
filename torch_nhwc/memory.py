"""Where tensors lie in memory."""

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from torch_nhwc.formats import Format, Strides


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor only says what a real one would be; by the name of its class, whose module may not be loaded."""
    return "FakeTensor" in (type(tensor).__name__, type(tensor.data).__name__)


def place_of(tensor: Tensor) -> int:
    """Equal for tensors that begin at one place in memory; of the object itself where there is no memory to see."""
    has_memory = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta
    return (tensor.data_ptr() if has_memory else 0) or id(tensor)


def tied_by_view(tensors: Iterable[Tensor | None], weights: Iterable[Tensor | None]) -> set[int]:
    """The identities of those that would come apart from others if they changed.

    They reach over memory of another tensor, which is not one of the weights, or reads that memory in another way.
    """
    spans = []
    for tensor in {id(each): each for each in (*tensors, *weights) if each is not None}.values():
        if type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta:
            try:
                reach, start = _reach(tensor), tensor.data_ptr()
            except RuntimeError:  # a transform's, which has no memory
                continue
            if reach and start:
                spans.append((start, start + reach, tensor))
    spans.sort(key=itemgetter(0))
    found: set[int] = set()
    known = {id(weight) for weight in weights}
    groups: list[list[Tensor]] = []  # of those that reach over each other, by way of others or not
    end = 0
    for start, stop, tensor in spans:
        if start < end:
            groups[-1].append(tensor)
        else:
            groups.append([tensor])
        end = max(end, stop)
    for group in groups:
        if len(group) > 1:
            identities = {id(tensor) for tensor in group}
            if len({_view_of(tensor) for tensor in group}) > 1 or not identities <= known:
                found |= identities
    return found


def _view_of(tensor: Tensor) -> tuple[object, ...]:
    """Equal for exact aliases, whatever their strides are in dimensions of size 1."""
    strides = tuple(stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1)
    return tensor.data_ptr(), tensor.shape, strides, tensor.dtype


def _reach(tensor: Tensor) -> int:
    """The bytes from a tensor's first element to behind its last one."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def lies_as(tensor: Tensor, strides: Strides) -> bool:
    """Whether every element lies where these strides put it, whatever they are in dimensions of size 1."""
    if tensor.layout != torch.strided:  # a sparse gradient has no layout to share
        return True
    return all(size <= 1 or own == other for size, own, other in zip(tensor.shape, tensor.stride(), strides))


def contiguous_copies() -> Callable[[Tensor], Tensor]:
    """A function that makes tensors contiguous: one that is stays the same one, and exact aliases stay aliases."""
    copies: dict[tuple[Any, ...], Tensor] = {}

    def contiguous(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or tensor.is_contiguous():
            return tensor
        place = tensor.device, place_of(tensor), tensor.shape, tensor.stride(), tensor.dtype
        if place not in copies:
            copies[place] = tensor.detach().clone(memory_format=torch.contiguous_format)
        return copies[place]

    return contiguous


def with_canonical_strides(dense: Tensor) -> Tensor:
    """A dense channels-last tensor in canonical strides, which it may not have in dimensions of size 1."""
    size = dense.shape
    if 0 in size:
        return dense.as_strided(size, Format(None).strides(size))
    if 1 not in size:
        return dense
    # Of one channel, or of one voxel: fewer views do, and take less time.
    in_order = dense if dense.is_contiguous() else dense.movedim(1, -1).flatten()
    return in_order.view(size[0], *size[2:], size[1]).movedim(-1, 1)
