"""What is asked for of a conversion, checked."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple, get_args

import torch
from torch import nn

from torch_nhwc.formats import Format
from torch_nhwc.modules.walk import is_within
from torch_nhwc.outcomes import Storage
from torch_nhwc.planning.plans import EachForward, expect_each_forward
from torch_nhwc.planning.rows import EntryRow
from torch_nhwc.reasons import Reason

FilterFunction = Callable[[nn.Module, str], bool]


class Request(NamedTuple):
    """What is asked for, checked."""

    format: Format
    storage: Storage = "auto"
    filter_fn: FilterFunction | None = None
    input_format: str | None = None
    preserve: bool = False
    each_forward: EachForward = False
    entries: tuple[EntryRow, ...] = ()
    """A plan's: of modules whose inputs are brought into a format."""
    differing: Collection[str] = ()
    """The paths of modules that stay as they are, and all inside of them: `verify` has found that they would differ."""

    @classmethod
    def of(
        cls,
        memory_format: torch.memory_format | str | None,
        storage: Storage | None,
        filter_fn: FilterFunction | None,
        input_format: Any,
        preserve: bool = False,
        each_forward: Any = False,
    ) -> "Request":
        """What the arguments of `plan` and `convert_` ask for.

        Raises:
            ValueError, TypeError: one of them is of no use.
        """
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
        wanted = Format.of(memory_format)
        if preserve and not wanted.is_channels_last:
            raise ValueError("preserve=True is for channels-last: torch.contiguous_format brings exchanged layers back")
        if expect_each_forward(each_forward) and not wanted.is_channels_last:
            raise ValueError("each_forward is for channels-last: torch.contiguous_format brings exchanged layers back")
        return cls(wanted, storage, filter_fn, input_name, bool(preserve), each_forward)

    def takes(self, module: nn.Module, path: str) -> bool:
        """Whether a layer is not left out."""
        return self.bar(module, path) is None

    def bar(self, module: nn.Module, path: str) -> Reason | None:
        """Why a layer is left out, or `None`."""
        if is_within(path, self.differing):
            return Reason.DIFFERS
        return None if self.filter_fn is None or self.filter_fn(module, path) else Reason.FILTERED
