"""Find the sites of a model: its convolution weights, and the layers that lose channels-last."""

import sys
from collections.abc import Callable, Container, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from torch_nhwc.nn.class_swap import original_class
from torch_nhwc.nn.replacements import (
    Replacement,
    always,
    has_own_method,
    is_known,
    is_patched,
    is_preserving,
    meets_small_input_rule,
    meets_strided_rule,
    never,
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
    kinds: dict[type, _LayerKind | None] = {}
    model_device: torch.device | None = None
    for path, module, wrapped in walk(model):
        module_type = type(module)
        kind = kinds[module_type] if module_type in kinds else kinds.setdefault(module_type, _layer_kind(module))
        if kind is None:
            continue
        fault = _fault_of(module, kind.faults) if kind.faults else None
        concerns = kind.replacement.concerns
        # A replaced layer has its row whatever its arguments are by then: a conversion back has to find it.
        loses = concerns is always or (concerns is not never and _holds(concerns, module))
        if not (loses or fault or kind.reason is Reason.EXCHANGED or path in planned):
            continue
        reason = kind.reason
        if reason is None:
            is_right = fault is not None or (kind.is_convolution and path in planned)  # whether or not it is faster
            device = _device_of(module)
            if device is None:
                device = model_device = model_device or _device_of_any(model)
            reason = _reason_of(module, kind.replacement, is_right, device)
            if reason is Reason.OTHER_DEVICE and not loses:  # PyTorch's faults are those of its CPU kernels
                continue
        if wrapped is not None and reason is not Reason.EXCHANGED:
            reason = wrapped
        what = kind.replacement.loses if loses or not kind.is_convolution else _GRADIENT
        found.append(ReplaceableLayer(path, module, kind.name, what, reason, fault))
    return found


class _LayerKind(NamedTuple):
    """What is the same for all layers of a class."""

    replacement: Replacement
    name: str
    """The name of the class in its package."""
    reason: Reason | None
    """Why no layer of the class can be replaced, or has to be."""
    faults: "_Faults"
    is_convolution: bool


def _layer_kind(module: nn.Module) -> _LayerKind | None:
    """Return what there is to know of a module's class; `None` if there is no replacement for it."""
    layer_type = _later_class(module) or type(module)
    replacement = None if issubclass(layer_type, torch.jit.ScriptModule) else replacement_for(layer_type)
    if replacement is None:
        return None
    original, reason = original_class(layer_type), None
    if is_preserving(layer_type):
        reason = Reason.EXCHANGED
    elif layer_type is not type(module):
        reason = Reason.LAZY_LAYER
    elif not is_known(original):
        reason = Reason.OTHER_CLASS
    elif is_patched(original):
        reason = Reason.FORWARD_REPLACED
    faults = [(has_fault, fault) for layers, has_fault, fault in _FAULTS if issubclass(layer_type, layers)]
    return _LayerKind(replacement, original.__name__, reason, faults, issubclass(layer_type, _CONVOLUTIONS))


_Faults = list[tuple[Callable[[Any], bool], Reason]]


def _fault_of(layer: nn.Module, faults: _Faults) -> Reason | None:
    """Return the first fault of a layer; `None` for a subclass that lacks the attributes of its base."""
    try:
        for has_fault, fault in faults:
            if has_fault(layer):
                return fault
    except AttributeError:
        pass
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
    module: nn.Module, replacement: Replacement, is_right: bool, device: torch.device | None
) -> Reason | None:
    """Return why a layer cannot be replaced, though others of its class are."""
    if has_own_method(module):
        return Reason.FORWARD_REPLACED
    if not (is_right or replacement.serves(module)):
        return Reason.OTHER_ARGUMENTS
    return None if device is None or device.type in MEASURED_DEVICES else Reason.OTHER_DEVICE


# The devices whose losses and faults are known; a meta tensor stands for one on a CPU.
MEASURED_DEVICES = ("cpu", "meta")


def _device_of(module: nn.Module) -> torch.device | None:
    """Return the device of a module's first tensor of its own."""
    for tensors in (module._parameters, module._buffers):
        for tensor in tensors.values():
            if tensor is not None:
                return tensor.device
    return None


def _device_of_any(model: nn.Module) -> torch.device | None:
    """Return the device of a model's first tensor."""
    return next((device for _, module, _ in walk(model) if (device := _device_of(module)) is not None), None)
