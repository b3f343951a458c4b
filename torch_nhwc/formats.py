"""Memory formats of weights: their names, the ranks that they serve, and their strides."""

from functools import cache
from typing import NamedTuple

import torch

Strides = tuple[int, ...]

# The channels-last format of a rank.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_RANKS = {"contiguous_format": (4, 5), "channels_last": (4,), "channels_last_3d": (5,)}


class Format(NamedTuple):
    """The memory format that is asked for."""

    name: str | None
    """As PyTorch calls it, without `torch.`; `None` is channels-last of each weight's rank."""

    @classmethod
    def of(cls, memory_format: torch.memory_format | str | None) -> "Format":
        """The format that a caller means.

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
        """Whether it is a channels-last format, of any rank."""
        return self.name != "contiguous_format"

    @property
    def for_operators(self) -> torch.memory_format | None:
        """What the operators take: channels-last is that of each weight's rank, by `None`."""
        return None if self.is_channels_last else torch.contiguous_format

    def serves(self, rank: int) -> bool:
        """Whether weights of a rank can have it."""
        return self.name is None or rank in _RANKS[self.name]

    def name_at(self, rank: int) -> str:
        """The name of what it is for weights of a rank."""
        return self.name or str(CHANNELS_LAST[rank]).removeprefix("torch.")

    def of_filters(self, channels: int, groups: int) -> "Format":
        """What the format comes to for a convolution: contiguous, where filters of one group have one channel.

        PyTorch computes some of those wrong on channels-last (h42 in docs/safety.md), and nothing would lie elsewhere.
        """
        return CONTIGUOUS if channels == 1 and groups == 1 else self

    def strides(self, shape: torch.Size) -> Strides:
        """The canonical strides: those that `torch.empty` gives a tensor of the shape in this format."""
        try:
            return _canonical_strides(shape, self.is_channels_last)
        except TypeError:  # symbolic sizes have no hash
            return _canonical_strides.__wrapped__(shape, self.is_channels_last)


@cache
def _canonical_strides(shape: torch.Size, is_channels_last: bool) -> Strides:
    wanted = CHANNELS_LAST.get(len(shape) if is_channels_last else 0, torch.contiguous_format)
    return torch.empty(shape, device="meta", memory_format=wanted).stride()


CONTIGUOUS = Format("contiguous_format")


def is_permuted(shape: torch.Size, strides: Strides) -> bool:
    """Whether strides put the elements of a tensor in another order than contiguous ones do."""
    return any(size > 1 and own != other for size, own, other in zip(shape, strides, CONTIGUOUS.strides(shape)))
