"""Finding the sites of a model: convolution layers, classes derived from them, and scripted ones."""

import sys
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_nhwc.sites import computed_weights, observed, scripted
from torch_nhwc.sites.convolutions import LAYERS
from torch_nhwc.sites.module_walk import walk
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.site import Found, Site, TensorContainer


def find(model: nn.Module, example_inputs: Any = None) -> Found:
    """Return the sites of a model, in its order, with those that show only when it runs on example inputs.

    Raises:
        TypeError: it is not a module.
        ValueError: lazy layers and example inputs together.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}{instead_of(model)}")
    found = walk_layers(model)
    return found if example_inputs is None else observed.add_sites(found, example_inputs)


def instead_of(given: Any) -> str:
    """Return what to give instead of something that is no module, as the end of an error's sentence."""
    if any(base.__name__ == "ExportedProgram" for base in type(given).__mro__):
        return ": convert the model before exporting it, or the .pt2 file by torch_nhwc.convert_saved"
    parts = given.values() if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else ()
    if parts and all(isinstance(each, nn.Module) for each in parts):
        return f": give torch.nn.{'ModuleDict' if isinstance(given, Mapping) else 'ModuleList'}(modules)"
    return ": torch_nhwc.checkpoint.convert_state_dict takes state dicts" if isinstance(given, Mapping) else ""


def walk_layers(model: nn.Module) -> Found:
    """Return the sites of a model's layers, in the model's order, each layer once."""
    sites: list[Site] = []
    tensors: list[Tensor | None] = []
    kinds: dict[type, tuple[str, int]] = {}
    for path, module, wrapped in walk(model):
        module_type = type(module)
        if module._parameters or module._buffers:
            tensors += (*module._parameters.values(), *module._buffers.values())
        if module_type not in kinds:
            kinds[module_type] = _kind_of(module_type)
        family, rank = kinds[module_type]
        if not family:
            continue
        if family == "layer":
            found = _sites_of_layer(path, module, rank, wrapped)
        elif family == "quantized":
            found = [_site(path, "weight", module, rank, None, Reason.PACKED)]
        elif isinstance(module, TensorContainer):
            found = module.sites(path)
        else:
            found = scripted.find(path, module)
            tensors += (*module.parameters(), *module.buffers())
        if wrapped is not None:
            found = [site if site.reason is Reason.PACKED else site.because(wrapped) for site in found]
        sites += found
    return Found(model, sites, set(kinds), tensors)


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is a convolution layer or derived from one, and neither quantized nor scripted."""
    return _kind_of(type(module))[0] == "layer"


_known: WeakKeyDictionary[type, tuple[str, int]] = WeakKeyDictionary()


def _kind_of(module_type: type) -> tuple[str, int]:
    """Return the family of a class (empty for most) and the rank of its weight."""
    kind = _known.get(module_type)
    if kind is None:
        kind = _known[module_type] = _kind_by_bases(module_type)
    return kind


def _kind_by_bases(module_type: type) -> tuple[str, int]:
    # Not by issubclass: quantized layers have an abstract base, which would go through all of its subclasses.
    bases = module_type.__mro__
    quantized_module = sys.modules.get("torch.ao.nn.quantized")
    if torch.jit.ScriptModule in bases:
        return "scripted", 0
    if TensorContainer in bases:
        return "container", 0
    for rank, layers in LAYERS.items():
        if any(layer in bases for layer in layers):
            return "layer", rank
        if quantized_module and any(getattr(quantized_module, layer.__name__, None) in bases for layer in layers):
            return "quantized", rank
    return "", 0


def _site(path: str, name: str, module: nn.Module, rank: int, tensor: Tensor | None, reason: Reason | None) -> Site:
    return Site(path, name, type(module).__name__, rank, getattr(module, "groups", 0), module, tensor, reason)


def _sites_of_layer(path: str, module: nn.Module, rank: int, wrapped: Reason | None) -> list[Site]:
    """Return the sites of a convolution layer, of which one with a computed weight may have several."""
    parameter = module._parameters.get("weight")
    if type(parameter) is nn.Parameter and parameter.dim() == rank:
        return [_site(path, "weight", module, rank, parameter, None)]
    if wrapped is Reason.FSDP1:  # a view of the flat buffer: autograd may even refuse to say whether it is a leaf
        return [_site(path, "weight", module, rank, None, wrapped)]
    # A computed weight is not even read: reading it runs the parametrization, which may update its own state.
    originals = computed_weights.originals(module)
    if originals is not None:
        reason = Reason.ORTHOGONAL if computed_weights.is_orthogonal(module) else None
        named = [(name, tensor) for name, tensor in originals.items() if tensor.dim() == rank]
        found = [_site(path, name, module, rank, tensor, reason) for name, tensor in named]
        return found or [_site(path, "weight", module, rank, None, Reason.COMPUTED)]
    weight: object = getattr(module, "weight", None)
    tensor = None
    # A property may compute its value without autograd's knowledge; a stored tensor is the same object every time.
    if not isinstance(weight, Tensor):
        reason = Reason.NO_WEIGHT
    elif is_lazy(weight):
        reason = Reason.LAZY
    elif weight is not parameter and not (weight.is_leaf and weight is module.weight):
        reason = Reason.COMPUTED
    else:
        tensor, reason = weight, None if weight.dim() == rank else Reason.UNSUPPORTED
    return [_site(path, "weight", module, rank, tensor, reason)]
