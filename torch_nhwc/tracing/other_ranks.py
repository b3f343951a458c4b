"""Losses through tensors of other ranks, in which no format has a name: `torch.stack([x, y], 1).sum(1)`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from torch_nhwc.tracing.traces import CONTIGUOUS, RANKS, FormatLoss, format_of, is_channels_last

# A result with a smaller share of the activation's elements does not hold the activation, such as a mean over space.
_LEAST_SHARE = 1 / 8


@dataclass
class _Loss:
    """An operator that wrote an activation to contiguous memory."""

    row: FormatLoss
    is_reported: bool = False


class _Content(NamedTuple):
    """The channels-last activation that a tensor was computed from."""

    sizes: torch.Size
    elements: int
    loss: _Loss | None
    """The operator that wrote it to contiguous memory; `None` while its channels are next to each other."""
    is_itself: bool = False
    """Whether the tensor is the activation, or one of its images: that an operator loses its format shows otherwise."""

    @property
    def rank(self) -> int:
        """The activation's rank."""
        return len(self.sizes)


class OtherRanks:
    """Follows activations in the forward through memory that is no activation of their rank."""

    def __init__(self) -> None:
        # By the address of a storage, with a weak reference that keeps the address from being used again.
        self._contents: dict[int, tuple[_Content, StorageWeakRef]] = {}

    def forget(self) -> None:
        """Forget memory that is gone."""
        self._contents = {
            key: each
            for key, each in self._contents.items()
            if not each[1].expired()  # type: ignore[no-untyped-call, unused-ignore]
        }

    def losses(
        self,
        read: Sequence[Tensor],
        formats: Sequence[str | None],
        results: Sequence[Tensor],
        describe: Callable[[Tensor], FormatLoss],
    ) -> Iterator[FormatLoss]:
        """Follow an operator, and yield the losses that show by what it wrote.

        A loss is the operator that wrote an activation to contiguous memory, once a contiguous activation of the
        activation's rank, width and height comes of it.

        Args:
            read: The activations that the operator read.
            formats: Their formats.
            results: What it returned, views as well.
            describe: Makes a loss of the operator that wrote a tensor.
        """
        content, source = self._content_of(read, formats)
        if content is None or source is None:
            return
        for each in results:
            if each.layout != torch.strided or each.numel() < content.elements * _LEAST_SHARE:
                continue
            if each.dim() == content.rank and (content.is_itself or is_channels_last(format_of(each))):
                continue
            is_new = each.untyped_storage()._cdata != source.untyped_storage()._cdata
            loss = content.loss
            if loss is None and is_new and each.is_contiguous() and not source.is_contiguous():
                loss = _Loss(describe(each))
            if each.dim() != content.rank or each.shape[2:] != content.sizes[2:]:
                if is_new:
                    storage = each.untyped_storage()
                    held = _Content(content.sizes, content.elements, loss)
                    self._contents[storage._cdata] = held, StorageWeakRef(storage)  # type: ignore[no-untyped-call, unused-ignore]
            elif loss is not None and not loss.is_reported and format_of(each) == CONTIGUOUS:
                loss.is_reported = True
                yield loss.row

    def _content_of(
        self, read: Sequence[Tensor], formats: Sequence[str | None]
    ) -> tuple[_Content | None, Tensor | None]:
        """Return the activation in what an operator reads, and the tensor that holds it; a lost one before others."""
        found: tuple[_Content | None, Tensor | None] = None, None
        for each, name in zip(read, formats):
            content = self._known(each)
            if content is not None and content.loss is not None:
                return content, each
            if found[0] is None:
                found = content or _content_of_view(each, name), each
        return found

    def _known(self, tensor: Tensor) -> _Content | None:
        if not self._contents or tensor.layout != torch.strided:
            return None
        known = self._contents.get(tensor.untyped_storage()._cdata)
        return known and known[0]


def _content_of_view(tensor: Tensor, name: str | None) -> _Content | None:
    """Return the channels-last activation that a tensor is, or a view of."""
    base, is_itself = tensor._base, is_channels_last(name)
    if is_itself and tensor.dim() == RANKS[name or ""]:
        return _Content(tensor.shape, tensor.numel(), None, is_itself)
    if base is None or not is_channels_last(format_of(base)):
        return None
    return _Content(base.shape, tensor.numel(), None, is_itself)
