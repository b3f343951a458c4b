"""The sites of a model's layers: of the convolution layers, what derives from them, and scripted ones."""

import sys
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_nhwc.finding import scripted
from torch_nhwc.finding.convolutions import LAYERS
from torch_nhwc.finding.held import Held
from torch_nhwc.finding.site import Found, Site
from torch_nhwc.modules import computed
from torch_nhwc.modules.walk import walk
from torch_nhwc.reasons import Reason


def walk_layers(model: nn.Module) -> Found:
    """The sites of a model's layers, in the model's order, each layer once."""
    sites: list[Site] = []
    tensors: list[Tensor | None] = []
    kinds: dict[type, tuple[str, int]] = {}  # of the model's classes, which are few
    for path, module, wrapped in walk(model):
        module_type = type(module)
        if module._parameters or module._buffers:
            tensors += (*module._parameters.values(), *module._buffers.values())
        kind = kinds.get(module_type)
        if kind is None:
            kind = kinds[module_type] = _kind_of(module_type)
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
        elif isinstance(module, Held):
            found += module.sites(path)
        else:
            found += scripted.find(path, module)
            tensors += (*module.parameters(), *module.buffers())
        if wrapped is not None:
            found = [site if site.reason is Reason.PACKED else site.because(wrapped) for site in found]
        sites += found
    return Found(model, sites, set(kinds), tensors)


def is_layer(module: nn.Module) -> bool:
    """Whether a module is a convolution layer, of PyTorch's or derived from one, and neither quantized nor scripted."""
    return _kind_of(type(module))[0] == "plain"


def _groups(module: nn.Module) -> int:
    return getattr(module, "groups", 0)


_known: WeakKeyDictionary[type, tuple[str, int]] = WeakKeyDictionary()  # the classes asked about before


def _kind_of(module_type: type) -> tuple[str, int]:
    kind = _known.get(module_type)
    if kind is None:
        kind = _known[module_type] = _kind_by_bases(module_type)
    return kind


def _kind_by_bases(module_type: type) -> tuple[str, int]:
    """Not by issubclass: quantized layers have an abstract base, which would look through all of its subclasses."""
    bases = module_type.__mro__
    quantized_module = sys.modules.get("torch.ao.nn.quantized")
    if torch.jit.ScriptModule in bases:
        return "scripted", 0
    if Held in bases:
        return "held", 0
    for rank, layers in LAYERS.items():
        if any(layer in bases for layer in layers):
            return "plain", rank
        if quantized_module and any(getattr(quantized_module, layer.__name__, None) in bases for layer in layers):
            return "quantized", rank
    return "", 0


def _special_sites(path: str, module: nn.Module, rank: int) -> list[Site]:
    """Of a layer whose weight is not just a parameter."""

    def site(name: str, tensor: Tensor | None, reason: Reason | None) -> Site:
        return Site(path, name, type(module).__name__, rank, _groups(module), module, tensor, reason)

    # A computed weight is not even read: reading runs the parametrization, which may update its own state.
    originals = computed.originals(module)
    if originals is not None:
        reason = Reason.ORTHOGONAL if computed.is_orthogonal(module) else None
        found = [site(name, tensor, reason) for name, tensor in originals.items() if tensor.dim() == rank]
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
