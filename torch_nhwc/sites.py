"""Finding the sites of a model: the weights of its convolutions."""

import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_nhwc import computed, scripted, wrapping
from torch_nhwc.reasons import Reason

# The layers whose weight has this rank. Each has a quantized and a scripted namesake.
LAYERS: dict[int, tuple[type[nn.Module], ...]] = {
    4: (nn.Conv2d, nn.ConvTranspose2d),
    5: (nn.Conv3d, nn.ConvTranspose3d),
}
# The channels-last format of a rank.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Site(NamedTuple):
    """A weight of a convolution, or the reason why there is none to convert."""

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

    def __str__(self) -> str:
        return f"{self.path!r} ({self.layer})" if self.path else f"the module itself ({self.layer})"


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, Reason | None]]:
    """Every module once, in the order of `named_modules`, with the reason that a wrapper around it gives.

    In one loop, since the generators of `named_modules` nest as deep as the model. The insides of a TorchScript module
    are left to `scripted`.
    """
    seen: set[int] = set()
    wrappers: dict[type, Reason | None] = {}
    stack: list[tuple[str, nn.Module, Reason | None]] = [("", model, None)]
    while stack:
        path, module, wrapped = entry = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if wrapped is None and (wrapper := wrapping.reason_of(module, wrappers)) is not None:
            wrapped = wrapper
            entry = path, module, wrapped
        yield entry
        if module._modules and not isinstance(module, torch.jit.ScriptModule):
            prefix = f"{path}." if path else ""
            for name, child in reversed(module._modules.items()):
                if child is not None:
                    stack.append((prefix + name, child, wrapped))


def find_sites(model: nn.Module) -> list[Site]:
    """The sites of a model, in the model's order, each layer once."""
    sites: list[Site] = []
    quantized_module = sys.modules.get("torch.ao.nn.quantized")
    # Asked once for each class, since a model has few, and by its bases: quantized layers have an abstract base, for
    # which issubclass looks through all of its subclasses.
    kinds: dict[type, tuple[str, int]] = {}
    for path, module, wrapped in walk(model):
        module_type = type(module)
        kind = kinds.get(module_type)
        if kind is None:
            kind = kinds[module_type] = _kind_of(module_type, quantized_module)
        family, rank = kind
        if not family:
            continue
        found: list[Site] = []
        if family == "plain":
            weight = module._parameters.get("weight")
            if type(weight) is nn.Parameter and weight.dim() == rank:
                found.append(Site(path, "weight", module_type.__name__, rank, _groups(module), module, weight, None))
            elif wrapped is Reason.FSDP1:  # a view of the flat buffer: autograd may not even say whether it is a leaf
                found.append(Site(path, "weight", module_type.__name__, rank, _groups(module), module, None, wrapped))
            else:
                found += _special_sites(path, module, rank)
        elif family == "quantized":
            found.append(Site(path, "weight", module_type.__name__, rank, _groups(module), module, None, Reason.PACKED))
        else:
            for relative, name, layer, dim, owner, tensor, reason in scripted.find(module):
                full = f"{path}.{relative}" if path and relative else path or relative
                found.append(Site(full, name, layer, dim, 0, owner, tensor, reason))
        if wrapped is not None:
            found = [site if site.reason is Reason.PACKED else site._replace(reason=wrapped) for site in found]
        sites += found
    return sites


def _groups(module: nn.Module) -> int:
    return getattr(module, "groups", 0)


def _kind_of(module_type: type, quantized_module: object) -> tuple[str, int]:
    bases = module_type.__mro__
    if torch.jit.ScriptModule in bases:
        return "scripted", 0
    for rank, layers in LAYERS.items():
        if any(layer in bases for layer in layers):
            return "plain", rank
        if quantized_module and any(getattr(quantized_module, layer.__name__) in bases for layer in layers):
            return "quantized", rank
    return "", 0


def _special_sites(path: str, module: nn.Module, rank: int) -> list[Site]:
    """Of a layer whose weight is not just a parameter."""

    def site(name: str, tensor: Tensor | None, reason: Reason | None) -> Site:
        return Site(path, name, type(module).__name__, rank, _groups(module), module, tensor, reason)

    # A computed weight is not even read: reading runs the parametrization, which may update its own state.
    originals = computed.originals(module)
    if originals is not None:
        found = [site(name, tensor, None) for name, tensor in originals.items() if tensor.dim() == rank]
        return found or [site("weight", None, Reason.COMPUTED)]
    parameter = module._parameters.get("weight")
    weight: object = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return [site("weight", None, Reason.NO_WEIGHT)]
    if is_lazy(weight):
        return [site("weight", None, Reason.LAZY)]
    # A property may compute its value without autograd's knowledge; a stored tensor is the same one every time.
    is_stored = weight is parameter or (weight.is_leaf and weight is module.weight)
    if not is_stored:
        return [site("weight", None, Reason.COMPUTED)]
    return [site("weight", weight, None if weight.dim() == rank else Reason.UNSUPPORTED)]
