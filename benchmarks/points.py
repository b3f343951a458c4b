"""The conversion of a single weight as data: what is measured at one point of a benchmark."""

from typing import NamedTuple

import torch

from torch_nhwc.layout import CHANNELS_LAST


class Point(NamedTuple):
    """A conversion, and whether the compiler's is measured as well."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    back: bool = False
    to: torch.dtype | None = None
    with_compile: bool = False

    @property
    def formats(self) -> tuple[torch.memory_format, torch.memory_format]:
        """The formats of the source and of the result."""
        channels_last = CHANNELS_LAST[len(self.shape)]
        return (channels_last, torch.contiguous_format) if self.back else (torch.contiguous_format, channels_last)

    def described(self) -> dict[str, object]:
        """Return the point as a part of a result."""
        dtype, to = (each and str(each).removeprefix("torch.") for each in (self.dtype, self.to))
        return {"shape": list(self.shape), "dtype": dtype, "to": to, "back": self.back}
