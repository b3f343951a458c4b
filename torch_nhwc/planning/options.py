"""The options of a conversion, checked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import nn

from torch_nhwc.layout import Format
from torch_nhwc.ops import Storage
from torch_nhwc.sites.reasons import Reason

FilterFunction = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class Options:
    """What `plan` and `convert_` were called with, checked."""

    format: Format
    storage: Storage = "auto"
    filter_fn: FilterFunction | None = None
    input_format: str | None = None
    preserve: bool = False
    each_forward: bool = False

    @classmethod
    def of(
        cls,
        memory_format: torch.memory_format | str | None = None,
        storage: Storage | None = None,
        filter_fn: FilterFunction | None = None,
        input_format: Any = None,
        preserve: bool = False,
        each_forward: bool = False,
    ) -> "Options":
        """Check the arguments of `plan` and `convert_`.

        Raises:
            ValueError, TypeError: One of them is not valid.
        """
        wanted = Format.of(memory_format)
        input_name = None if input_format is None else str(input_format).removeprefix("torch.")
        if input_name not in (None, "channels_last", "channels_last_3d"):
            raise ValueError(
                "expected input_format to be 'channels_last', 'channels_last_3d' for volumes alone, or None, "
                f"got {input_format!r}"
            )
        storage = "auto" if storage is None else storage
        if storage not in get_args(Storage):
            raise ValueError(f"expected storage to be one of {', '.join(get_args(Storage))}, got {storage!r}")
        if filter_fn is not None and not callable(filter_fn):
            raise TypeError(f"expected filter_fn to be a function of a module and its path, got {filter_fn!r}")
        for name, value in (("preserve", preserve), ("each_forward", each_forward)):
            if not isinstance(value, bool):
                raise ValueError(f"expected {name} to be True or False, got {value!r}")
            if value and not wanted.is_channels_last:
                raise ValueError(
                    f"{name}=True is for channels-last: torch.contiguous_format restores the layers' original classes"
                )
        return cls(wanted, storage, filter_fn, input_name, preserve, each_forward)

    def skip_reason(self, module: nn.Module, path: str) -> Reason | None:
        """Return why a layer is left out, or `None`."""
        return None if self.filter_fn is None or self.filter_fn(module, path) else Reason.FILTERED
