"""What happens to one site, or to one layer that loses channels-last: the rows of plans and reports, as plain data."""

import enum
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from torch_nhwc.layout import Strides
from torch_nhwc.ops import Outcome
from torch_nhwc.sites.reasons import Reason


class Action(str, enum.Enum):
    """An action is what happens to a site, that is to one convolution weight, or to a layer.

    Example:
        >>> torch_nhwc.plan(torch.nn.Conv2d(3, 8, 3)).rows[0].action is torch_nhwc.planning.Action.CONVERT
        True
    """

    CONVERT = "convert"
    """The weight is converted; bytes move."""
    RESTRIDE = "restride"
    """Only the weight's strides change."""
    KEEP = "keep"
    """There is nothing to do, or it was not requested."""
    REFUSE = "refuse"
    """The weight should change and cannot; the reason says why, and what to do."""
    EACH_FORWARD = "each_forward"
    """The weight stays as it is, and its layer converts it in each forward."""
    EXCHANGE = "exchange"
    """The layer's class is replaced by one that keeps channels-last."""


@dataclass(slots=True, unsafe_hash=True)
class PlanRow:
    """A row says what happens to one site, that is to one weight of one convolution, and in a report what happened.

    Example:
        >>> row = torch_nhwc.plan(torch.nn.Conv2d(3, 8, 3)).rows[0]
        >>> row.full_name, row.strides, row.target_strides
        ('weight', (27, 9, 3, 1), (27, 1, 9, 3))
    """

    path: str
    """The layer's path in the model; empty for the model itself."""
    name: str
    """The tensor's name in the layer."""
    layer: str
    """The layer's class."""
    rank: int
    shape: tuple[int, ...] | None
    """`None` where there is no tensor yet, or none to see."""
    groups: int
    """0 where the number of groups is not known."""
    dtype: str | None
    device: str | None
    strides: Strides | None
    """The weight's strides before the conversion."""
    target_strides: Strides | None
    """`None` where the site is not to change."""
    bytes_to_move: int
    action: Action
    reason: Reason | None
    outcome: Outcome | None = field(default=None, compare=False)
    """What the operators did to the weight, in a report. `None` where they were not called, and in a plan."""

    @property
    def full_name(self) -> str:
        """The weight's name in the state dict."""
        return f"{self.path}.{self.name}" if self.path else self.name

    @property
    def is_wanted(self) -> bool:
        """Whether the weight should be in the format, now or once it has a shape."""
        return self.target_strides is not None or self.reason is Reason.LAZY

    @property
    def is_in_each_forward(self) -> bool:
        """Whether the weight is to be converted in each forward, or is so already."""
        return self.action is Action.EACH_FORWARD or self.reason is Reason.IN_EACH_FORWARD

    @property
    def changes(self) -> bool:
        """Whether the operators are called for the weight."""
        return self.shape is not None and self.action in _CHANGES

    @property
    def takes_part(self) -> bool:
        """Whether the weight is in the format in the end, and its companions with it."""
        return (
            self.target_strides is not None
            and self.action is not Action.REFUSE
            and self.reason is not Reason.FAKE
            and self.reason is not Reason.TIED
        )

    def refuse(self, reason: Reason | None, action: Action = Action.REFUSE) -> None:
        """Leave the weight as it is, for a reason that was found after the row was made."""
        self.action, self.reason, self.bytes_to_move = action, reason, 0


_CHANGES = (Action.CONVERT, Action.RESTRIDE)


class LayerRow(NamedTuple):
    """A row says what happens to one layer that loses channels-last.

    Example:
        >>> plan = torch_nhwc.plan(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GELU()), preserve=True)
        >>> plan.layers[0].path, plan.layers[0].layer, plan.layers[0].action
        ('1', 'GELU', <Action.EXCHANGE: 'exchange'>)
    """

    path: str
    """The layer's path in the model; empty for the model itself."""
    layer: str
    """The layer's original class."""
    loses: str
    """What the layer loses on channels-last."""
    action: Action
    """`EXCHANGE` or `KEEP`."""
    reason: Reason | None
    """Why the layer stays as it is."""

    @property
    def is_wanted(self) -> bool:
        """Whether the layer is to keep channels-last, or does already."""
        return self.action is Action.EXCHANGE or self.reason is Reason.EXCHANGED


class CompanionRow(NamedTuple):
    """A row says what was done to a gradient, a state of an optimizer or an averaged copy.

    Example:
        >>> model = torch.nn.Conv2d(3, 8, 3)
        >>> model.weight.grad = torch.zeros(8, 3, 3, 3)
        >>> torch_nhwc.convert_(model).companions
        (CompanionRow(site='weight', label='grad', outcome=<Outcome.IN_PLACE: 2>, reason=None),)
    """

    site: str
    """The full name of its weight."""
    label: str
    """`grad`, `ema`, `ema.grad`, or the optimizer's name for its state."""
    outcome: Outcome | None
    """`None` where the tensor stays as it is."""
    reason: Reason | None
    """Why the tensor stays as it is."""


# Cached, since a model has few different dtypes and devices, and many weights.
as_text = cache(str)
