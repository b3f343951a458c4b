"""One line of a plan: what is to happen to a site, as plain data."""

import enum
from functools import cache
from typing import NamedTuple

from torch_nhwc.formats import Strides
from torch_nhwc.outcomes import Outcome
from torch_nhwc.reasons import Reason


class Action(str, enum.Enum):
    """An action is what happens to a site, that is to one convolution weight, or to a layer.

    Example:
        >>> torch_nhwc.plan(torch.nn.Conv2d(3, 8, 3)).rows[0].action is torch_nhwc.Action.CONVERT
        True
    """

    CONVERT = "convert"
    """It is brought into the format; bytes move."""
    RESTRIDE = "restride"
    """Only its strides change."""
    KEEP = "keep"
    """There is nothing to do, or it was not asked for."""
    REFUSE = "refuse"
    """It should change and cannot; the reason says why, and what to do."""
    EACH_FORWARD = "each_forward"
    """It stays as it is, and is converted on its way to the convolution, in each forward."""
    EXCHANGE = "exchange"
    """Of a layer: its class becomes one that keeps channels-last."""


class PlanRow(NamedTuple):
    """A row says what is to happen to one site: to one weight of one convolution.

    Example:
        >>> row = torch_nhwc.plan(torch.nn.Conv2d(3, 8, 3)).rows[0]
        >>> row.full_name, row.strides, row.target_strides
        ('weight', (27, 9, 3, 1), (27, 1, 9, 3))
    """

    path: str
    """Of the layer in the model; empty for the model itself."""
    name: str
    """Of the tensor in the layer."""
    layer: str
    """The layer's class."""
    rank: int
    shape: tuple[int, ...] | None
    """`None` where there is no tensor yet, or none to see."""
    groups: int
    """0 where they are not known."""
    dtype: str | None
    device: str | None
    strides: Strides | None
    target_strides: Strides | None
    """`None` where the site is not to change."""
    bytes_to_move: int
    action: Action
    reason: Reason | None
    outcome: Outcome | None = None
    """In `Report.rows`, what the operators did to the weight; `None` where they were not called, and in a plan."""

    @property
    def full_name(self) -> str:
        """As in the state dict."""
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def is_wanted(self) -> bool:
        """Whether the site is to be in the format, now or once it can be."""
        return self.target_strides is not None or self.reason is Reason.LAZY

    @property
    def is_in_each_forward(self) -> bool:
        """Whether the weight is to be converted in each forward, or is so already."""
        return self.action is Action.EACH_FORWARD or self.reason is Reason.IN_EACH_FORWARD


class LayerRow(NamedTuple):
    """A row says what is to happen to one layer that loses on channels-last.

    Example:
        >>> plan = torch_nhwc.plan(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GELU()), preserve=True)
        >>> plan.layers[0].path, plan.layers[0].layer, plan.layers[0].action
        ('1', 'GELU', <Action.EXCHANGE: 'exchange'>)
    """

    path: str
    """Of the layer in the model; empty for the model itself."""
    layer: str
    """The layer's class, as its package has it."""
    loses: str
    """What it loses on channels-last."""
    action: Action
    """`EXCHANGE` or `KEEP`."""
    reason: Reason | None
    """Why it stays as it is."""

    @property
    def is_wanted(self) -> bool:
        """Whether the layer is to keep channels-last, or does."""
        return self.action is Action.EXCHANGE or self.reason is Reason.EXCHANGED


class EntryRow(NamedTuple):
    """A row says into which format the images and volumes that a module is given are brought, at its entry.

    Example:
        >>> row = torch_nhwc.EntryRow("1", "contiguous_format", is_shared=False)
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> plan = dataclasses.replace(torch_nhwc.plan(model), entries=(row,))
        >>> _ = torch_nhwc.convert_(model, plan=plan)
        >>> model(torch.randn(2, 3, 8, 8)).is_contiguous()
        True
    """

    path: str
    """Of the module in the model; empty for the model itself."""
    memory_format: str
    """`"channels_last"`, which is that of each input's rank, or `"contiguous_format"`."""
    is_shared: bool
    """Whether other modules are given the same tensor, and take the copy as well."""


# What rows have of dtypes, devices and shapes. Remembered, since a model has few of them and many weights.
as_text, as_tuple = cache(str), cache(tuple)
