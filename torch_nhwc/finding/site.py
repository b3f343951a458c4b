"""The site: what every stage of a conversion is about."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn

from torch_nhwc.reasons import Reason


@dataclass(slots=True)  # made faster than a tuple with names
class Site:
    """One weight of one convolution in a model, or the reason why there is none to convert."""

    path: str
    """Of the layer in the model, as in `named_modules`; empty for the model itself."""
    name: str
    """Of the tensor in the layer: `weight`, or the original of a computed weight."""
    layer: str
    """The layer's class."""
    rank: int
    """Of the weight, also where there is no tensor to ask."""
    groups: int
    """Of the convolution; 0 where they are not known."""
    module: nn.Module
    tensor: Tensor | None
    reason: Reason | None
    """Why the site cannot be converted, or must not; what to know about it otherwise; mostly `None`."""

    @property
    def full_name(self) -> str:
        """As in the state dict."""
        return f"{self.path}.{self.name}" if self.path else self.name

    def because(self, reason: Reason | None) -> "Site":
        """The same site with another reason."""
        return replace(self, reason=reason)

    def __str__(self) -> str:
        return f"{self.path!r} ({self.layer})" if self.path else f"the module itself ({self.layer})"


class Found(NamedTuple):
    """What one walk over a model has seen."""

    model: nn.Module
    sites: list[Site]
    module_types: set[type]
    """The classes of all modules, but for the insides of TorchScript modules."""
