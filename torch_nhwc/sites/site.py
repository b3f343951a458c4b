"""The sites of a model, the walk over its modules, and the operators that convolve."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from torch_nhwc.layout import Format
from torch_nhwc.sites import wrappers
from torch_nhwc.sites.reasons import Reason


@dataclass(slots=True)  # it is constructed faster than a NamedTuple
class Site:
    """One weight of one convolution in a model, or the reason why there is none to convert."""

    path: str
    """The layer's path, as in `named_modules`; empty for the model itself."""
    name: str
    """The tensor's name in the layer: `weight`, or the original of a computed weight."""
    layer: str
    """The layer's class."""
    rank: int
    """The weight's rank, known even if there is no tensor."""
    groups: int
    """The groups of the convolution; 0 if they are not known."""
    module: nn.Module
    tensor: Tensor | None
    reason: Reason | None
    """Why the site cannot or must not be converted, or a remark on it; mostly `None`."""

    @property
    def full_name(self) -> str:
        """The weight's name in the state dict."""
        return f"{self.path}.{self.name}" if self.path else self.name

    def format(self, wanted: Format) -> Format:
        """Return the format that a requested one amounts to for this convolution."""
        if self.groups != 1:
            return wanted
        if self.name == "weight" or not hasattr(self.module, "in_channels"):
            shape = () if self.tensor is None else self.tensor.shape
            channels = shape[1] if len(shape) > 1 else 0
        else:  # the originals of a computed weight may have other shapes, as the norms of weight_norm do
            of_filters = "out_channels" if getattr(self.module, "transposed", False) else "in_channels"
            channels = getattr(self.module, of_filters)
        return wanted.of_filters(channels, self.groups)

    def because(self, reason: Reason | None) -> "Site":
        """Return the same site with another reason."""
        return replace(self, reason=reason)

    def __str__(self) -> str:
        return f"{self.path!r} ({self.layer})" if self.path else f"the module itself ({self.layer})"


class ReplaceableLayer(NamedTuple):
    """A layer that is worse on channels-last, or wrong, than its replacement, which it may be already."""

    path: str
    module: nn.Module
    kind: str
    """The name of its class in its package."""
    gains: str
    """The end of a sentence on the replacement that begins with "it is"."""
    reason: Reason | None
    """Why it cannot be replaced, or need not be."""
    gains_here: bool | None = None
    """Whether it gains on this machine; `None` where that does not depend on the machine, or it is replaced already."""


class Found(NamedTuple):
    """What one walk over a model has found."""

    model: nn.Module
    sites: list[Site]
    module_types: set[type]
    """The classes of all modules, without those inside of TorchScript modules."""
    tensors: list[Tensor | None]
    """All parameters and buffers, sites or not."""
    layers: Sequence[ReplaceableLayer] = ()
    observed: bool = False
    """True if the model ran on example inputs."""

    @property
    def weights(self) -> list[Tensor | None]:
        """The tensor of each site."""
        return [site.tensor for site in self.sites]

    @property
    def trains(self) -> bool:
        """Return whether a tensor of the model requires a gradient."""
        return any(tensor is not None and tensor.requires_grad for tensor in self.tensors)


class TensorContainer(nn.Module):
    """A module that stands for tensors which belong to no module. Their names may have dots.

    Parameters stay parameters, and other tensors are its buffers. A subclass says which of them are sites.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self._parameters[name] = tensor
            else:
                self._buffers[name] = tensor

    def sites(self, prefix: str) -> list[Site]:
        """Return the sites among the tensors; `prefix` is the path of this module in the model."""
        raise NotImplementedError


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, Reason | None]]:
    """Yield every module once: its path, the module, and the reason that a wrapper around it gives, or `None`.

    The order is that of `named_modules`, whose nested generators take quadratic time in a deep model. The modules
    inside of a TorchScript module are left to `sites.scripted`.
    """
    seen: set[int] = set()  # by identity, since a module may define its own equality
    stack: list[tuple[str, nn.Module, Reason | None]] = [("", model, None)]
    while stack:
        path, module, reason = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        reason = reason or wrappers.reason_of(module)
        yield path, module, reason
        if module._modules and not isinstance(module, torch.jit.ScriptModule):
            prefix = f"{path}." if path else ""
            for name, child in reversed(module._modules.items()):
                if child is not None:
                    stack.append((prefix + name, child, reason))


# The layers whose weight has this rank. Each may have a quantized and a scripted namesake.
LAYERS: dict[int, tuple[type[nn.Module], ...]] = {
    4: (nn.Conv2d, nn.ConvTranspose2d),
    5: (nn.Conv3d, nn.ConvTranspose3d),
}
RANKS = {layer.__name__: rank for rank, layers in LAYERS.items() for layer in layers}

# The operators, with the rank of their weight, which is their second argument. 0 means any rank, 1D convolutions too:
# their fourth argument (the stride or the padding) has as many elements as the kernel has dimensions.
OPERATORS = {
    **dict.fromkeys(("aten::conv2d", "aten::conv_transpose2d", "nhwc::conv2d", "nhwc::conv_transpose2d"), 4),
    **dict.fromkeys(("aten::conv3d", "aten::conv_transpose3d", "nhwc::conv3d", "nhwc::conv_transpose3d"), 5),
    **dict.fromkeys(("aten::convolution", "aten::_convolution", "aten::_convolution_mode"), 0),
    **dict.fromkeys(("aten::mkldnn_convolution", "prim::mkldnn_convolution"), 0),
}

# The operators whose result is the same weight: another name for it, another dtype (autocast), or one known not to be
# `None`.
PASSING_ON = {
    *("aten::alias", "aten::clone", "aten::detach", "aten::to", "aten::_to_copy"),
    *("prim::unchecked_cast", "nhwc::convert_weight"),
}
