"""The site: what every stage of a conversion is about."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn

from torch_nhwc.formats import Format
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

    def format(self, wanted: Format) -> Format:
        """What a format comes to for its convolution."""
        if self.name == "weight" or not hasattr(self.module, "in_channels"):
            channels = 0 if self.tensor is None or self.tensor.dim() < 2 else self.tensor.shape[1]
        else:  # what a weight is computed from may be of another shape, as the norms of weight_norm are
            of_filters = "out_channels" if getattr(self.module, "transposed", False) else "in_channels"
            channels = getattr(self.module, of_filters)
        return wanted.of_filters(channels, self.groups)

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
    tensors: list[Tensor | None]
    """All parameters and buffers, sites or not."""
    observed: bool = False
    """Whether the model ran on example inputs."""

    @property
    def trains(self) -> bool:
        """Whether the model has tensors that need gradients."""
        return any(tensor is not None and tensor.requires_grad for tensor in self.tensors)
