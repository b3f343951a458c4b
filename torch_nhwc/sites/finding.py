"""Find the sites of a model: its convolution weights, and the layers that lose channels-last."""

import sys
from collections.abc import Callable, Container, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from torch_nhwc.nn.class_swap import original_class
from torch_nhwc.nn.replacements import (
    Replacement,
    is_known,
    is_patched,
    is_preserving,
    meets_small_input_rule,
    meets_strided_rule,
    replacement_for,
    takes_statistics,
)
from torch_nhwc.sites import computed_weights, observed, scripted
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.site import LAYERS, Found, Site, TensorContainer, walk


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
    module_types: set[type] = set()
    for path, module, wrapped in walk(model):
        module_type = type(module)
        if module._parameters or module._buffers:
            tensors += (*module._parameters.values(), *module._buffers.values())
        module_types.add(module_type)
        family, rank = _kind_of(module_type)  # type: ignore[arg-type]
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
    return Found(model, sites, module_types, tensors)


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is a convolution layer or derived from one, and neither quantized nor scripted."""
    return _kind_of(type(module))[0] == "layer"  # type: ignore[arg-type]


@lru_cache(maxsize=256)  # bounded, since it keeps the classes alive
def _kind_of(module_type: type) -> tuple[str, int]:
    """Return the family of a class (empty for most) and the rank of its weight."""
    # This does not use issubclass: quantized layers have an abstract base, which would try all of its subclasses.
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


class ReplaceableLayer(NamedTuple):
    """A layer that is worse on channels-last than its replacement, which it may be already, or wrong in any format."""

    path: str
    module: nn.Module
    kind: str
    """The name of its class in its package."""
    loses: str
    """The end of a sentence that begins with "on channels-last it loses"."""
    reason: Reason | None
    """Why it cannot be replaced, or need not be."""
    fault: Reason | None
    """What PyTorch computes wrong in it."""


_CONVOLUTIONS = tuple(layer for layers in LAYERS.values() for layer in layers)
# What PyTorch computes wrong in a layer. The layer alone decides, and not the machine: ranks and saved plans agree.
_FAULTS: tuple[tuple[tuple[type, ...], Callable[[Any], bool], Reason], ...] = (
    (_CONVOLUTIONS, meets_strided_rule, Reason.STRIDED_POINTWISE),
    (_CONVOLUTIONS, meets_small_input_rule, Reason.SMALL_INPUTS),
    ((nn.BatchNorm2d, nn.BatchNorm3d), takes_statistics, Reason.BATCH_STATISTICS),
)
_GRADIENT = "the right gradient of its weight, on some CPUs"


def find_replaceable_layers(model: nn.Module, planned: Container[str] = ()) -> list[ReplaceableLayer]:
    """Return the layers of a model that lose on channels-last, or that PyTorch computes wrong, in its order.

    Args:
        model: The model.
        planned: Paths of layers that a plan names. They are returned whatever their mode is by now.

    Example:
        >>> (layer,) = torch_nhwc.sites.finding.find_replaceable_layers(torch.nn.Sequential(torch.nn.GELU()))
        >>> layer.path, layer.kind, layer.loses
        ('0', 'GELU', 'speed, forward and backward')
    """
    found = []
    replacements: dict[type, Replacement | None] = {}  # of the model's classes, which are few
    device, modules = None, [*walk(model)]
    for path, module, wrapped in modules:
        layer_type = _later_class(module) or type(module)
        if layer_type not in replacements:
            is_scripted = issubclass(layer_type, torch.jit.ScriptModule)
            replacements[layer_type] = None if is_scripted else replacement_for(layer_type)
        replacement = replacements[layer_type]
        if replacement is None:
            continue
        fault = _fault_of(module)
        # A replaced layer has its row whatever its arguments are by then: a conversion back has to find it.
        loses = _holds(replacement.concerns, module)
        if loses or fault or is_preserving(layer_type) or path in planned:
            original = original_class(layer_type)
            device = device or _device_of(modules)
            reason = _reason_of(module, original, replacement, device)
            if reason is Reason.OTHER_ARGUMENTS and fault is not None:
                reason = None  # nothing is gained, but it is right
            if wrapped is not None and reason is not Reason.EXCHANGED:
                reason = wrapped
            what = replacement.loses if loses or not isinstance(module, _CONVOLUTIONS) else _GRADIENT
            found.append(ReplaceableLayer(path, module, original.__name__, what, reason, fault))
    return found


def _fault_of(module: nn.Module) -> Reason | None:
    for layers, has_fault, reason in _FAULTS:
        if isinstance(module, layers) and _holds(has_fault, module):
            return reason
    return None


def _holds(predicate: Callable[[Any], bool], layer: nn.Module) -> bool:
    """Return what a predicate says of a layer; false for a subclass that lacks the attributes of its base."""
    try:
        return predicate(layer)
    except AttributeError:
        return False


def _later_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that a lazy layer has after its first forward; `None` for others."""
    return module.cls_to_become if isinstance(module, LazyModuleMixin) else None


def _reason_of(
    module: nn.Module, original: type, replacement: Replacement, model_device: torch.device | None
) -> Reason | None:
    if is_preserving(type(module)):
        return Reason.EXCHANGED
    if _later_class(module) is not None:
        return Reason.LAZY_LAYER
    if not is_known(original):
        return Reason.OTHER_CLASS
    if is_patched(module, original):
        return Reason.FORWARD_REPLACED
    if not replacement.serves(module):
        return Reason.OTHER_ARGUMENTS
    device = _device_of([("", module, None)]) or model_device
    is_measured = device is None or device.type in ("cpu", "meta")
    return None if is_measured else Reason.OTHER_DEVICE


def _device_of(modules: Iterable[tuple[str, nn.Module, Reason | None]]) -> torch.device | None:
    """Return the device of the first tensor of some modules."""
    tensors = (each for _, module, _ in modules for each in (*module._parameters.values(), *module._buffers.values()))
    return next((each.device for each in tensors if each is not None), None)
