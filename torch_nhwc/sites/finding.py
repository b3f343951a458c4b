"""Find the sites of a model: its convolution weights, and the layers that lose channels-last."""

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from torch_nhwc import ops
from torch_nhwc.nn.class_swap import original_class
from torch_nhwc.nn.replacements import (
    Replacement,
    has_own_method,
    is_known,
    is_patched,
    is_preserving,
    replacement_for,
)
from torch_nhwc.sites import computed_weights, observed, scripted
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.site import LAYERS, Found, ReplaceableLayer, Site, TensorContainer, walk


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
    """Return the sites of a model's layers, and the layers that can be replaced, in its order, each layer once."""
    sites: list[Site] = []
    tensors: list[Tensor | None] = []
    layers: list[ReplaceableLayer] = []
    kinds: dict[type, _LayerKind] = {}
    for path, module, wrapped in walk(model):
        module_type = type(module)
        if module._parameters or module._buffers:
            tensors += (*module._parameters.values(), *module._buffers.values())
        kind = kinds[module_type] if module_type in kinds else kinds.setdefault(module_type, _layer_kind(module))
        family, rank = kind.family, kind.rank
        if kind.replacement is not None:
            layers.append(_replaceable(path, module, kind, wrapped))
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
    device = next((tensor.device for tensor in tensors if tensor is not None), None)
    if device is not None and device.type not in MEASURED_DEVICES:  # that of layers without tensors, too
        layers = [_on_device(each, device) if _device_of(each.module) is None else each for each in layers]
    gaining = [each for each in layers if each.gains_here is not False or _gains_on_cpu(kinds[type(each.module)])]
    return Found(model, sites, {*kinds}, tensors, gaining)


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is a convolution layer or derived from one, and neither quantized nor scripted."""
    return _kind_of(type(module))[0] == "layer"


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


class _LayerKind(NamedTuple):
    """What is the same for all layers of a class."""

    family: str
    """What kind of convolution it is; empty for other layers."""
    rank: int
    """The rank of its weight."""
    replacement: Replacement | None
    name: str = ""
    """The name of the class in its package."""
    reason: Reason | None = None
    """Why no layer of the class can be replaced, or has to be."""


def _layer_kind(module: nn.Module) -> _LayerKind:
    layer_type = _later_class(module) or type(module)
    family = _kind_of(type(module))
    replacement = None if family[0] == "scripted" else replacement_for(layer_type)
    if replacement is None:
        return _LayerKind(*family, None)
    original, reason = original_class(layer_type), None
    if is_preserving(layer_type):
        reason = Reason.REPLACED
    elif layer_type is not type(module):
        reason = Reason.LAZY_LAYER
    elif is_patched(original):
        reason = Reason.FORWARD_REPLACED
    elif not is_known(original):
        reason = Reason.OTHER_CLASS
    return _LayerKind(*family, replacement, original.__name__, reason)


def _gains_on_cpu(kind: _LayerKind) -> bool:
    return kind.replacement is not None and kind.replacement.on_cpu


def _replaceable(path: str, module: nn.Module, kind: _LayerKind, wrapped: Reason | None) -> ReplaceableLayer:
    replacement: Any = kind.replacement
    reason = kind.reason
    if reason is not Reason.REPLACED:
        reason = wrapped or reason or _reason_of(module, replacement)
    gains_here = None
    if reason is not Reason.REPLACED:
        gains_here = replacement.gains_here(module) if replacement.gains_here else None if replacement.on_cpu else False
    is_on_gpu = getattr(_device_of(module), "type", None) == "cuda"
    gains = (replacement.gains_on_gpu if is_on_gpu else None) or replacement.gains
    return ReplaceableLayer(path, module, kind.name, gains, reason, gains_here)


def _later_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that a lazy layer has after its first forward; `None` for others."""
    return module.cls_to_become if isinstance(module, LazyModuleMixin) else None


def _reason_of(module: nn.Module, replacement: Replacement) -> Reason | None:
    """Return why a layer cannot be replaced, though others of its class are."""
    if has_own_method(module):
        return Reason.FORWARD_REPLACED
    if not replacement.serves(module):
        return Reason.OTHER_ARGUMENTS
    device = _device_of(module)
    return None if device is None else _reason_of_device(device, module, replacement)


def _on_device(layer: ReplaceableLayer, device: torch.device) -> ReplaceableLayer:
    """Return a layer without tensors as it is in a model on a GPU."""
    if layer.reason is not None:
        return layer
    replacement: Any = _layer_kind(layer.module).replacement
    reason = _reason_of_device(device, layer.module, replacement)
    return layer._replace(reason=reason, gains_here=layer.gains_here if replacement.on_cpu else reason is None)


def _reason_of_device(device: torch.device, layer: nn.Module, replacement: Replacement) -> Reason | None:
    """Return `OTHER_DEVICE` where it is not known what a layer loses on a device, or nothing replaces it there."""
    if device.type in MEASURED_DEVICES or (device.type == "cuda" and is_depthwise_volume(layer)):
        return None
    if not replacement.on_gpu(layer):
        return Reason.OTHER_DEVICE
    ops.qualify_norms(device)
    return None if ops.runs_cuda_norms(device) else Reason.OTHER_DEVICE


def is_depthwise_volume(layer: nn.Module) -> bool:
    """Return whether a layer is a depthwise 3D convolution, which cuDNN computes slowly in channels-last."""
    return isinstance(layer, nn.Conv3d) and layer.groups == layer.in_channels > 1


# The devices whose losses and faults are known; a meta tensor stands for one on a CPU.
MEASURED_DEVICES = ("cpu", "meta")


def _device_of(module: nn.Module) -> torch.device | None:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return next((each.device for each in tensors if each is not None), None)
