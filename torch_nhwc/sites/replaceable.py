"""The layers of a model that lose on channels-last, and what prevents replacing one."""

from itertools import chain
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from torch_nhwc.nn.class_swap import original_class
from torch_nhwc.nn.replacements import Replacement, is_known, is_patched, is_preserving, replacement_for
from torch_nhwc.sites.module_walk import walk
from torch_nhwc.sites.reasons import Reason


class ReplaceableLayer(NamedTuple):
    """A layer that loses on channels-last, replaced or not."""

    path: str
    module: nn.Module
    kind: str
    """The name of its class in its package."""
    loses: str
    """The end of a sentence that begins with "on channels-last it loses"."""
    reason: Reason | None
    """Why it cannot be replaced, or need not be."""


def find_replaceable_layers(model: nn.Module) -> list[ReplaceableLayer]:
    """Return the layers of a model that lose on channels-last, in its order.

    Example:
        >>> (layer,) = torch_nhwc.sites.replaceable.find_replaceable_layers(torch.nn.Sequential(torch.nn.GELU()))
        >>> layer.path, layer.kind, layer.loses
        ('0', 'GELU', 'speed, forward and backward')
    """
    found = []
    replacements: dict[type, Replacement | None] = {}  # of the model's classes, which are few
    device = _device_of(model)
    for path, module, wrapped in walk(model):
        layer_type = _later_class(module) or type(module)
        if layer_type not in replacements:
            is_scripted = issubclass(layer_type, torch.jit.ScriptModule)
            replacements[layer_type] = None if is_scripted else replacement_for(layer_type)
        replacement = replacements[layer_type]
        # A replaced layer has its row whatever its arguments are by then: a conversion back has to find it.
        if replacement is not None and (is_preserving(layer_type) or replacement.concerns(module)):
            original = original_class(layer_type)
            reason = _reason_of(module, original, replacement, device)
            if wrapped is not None and reason is not Reason.EXCHANGED:
                reason = wrapped
            found.append(ReplaceableLayer(path, module, original.__name__, replacement.loses, reason))
    return found


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
    device = _device_of(module) or model_device
    is_measured = device is None or device.type in ("cpu", "meta")
    return None if is_measured else Reason.OTHER_DEVICE


def _device_of(module: nn.Module) -> torch.device | None:
    """Return the device of a module's first tensor."""
    return next((tensor.device for tensor in chain(module.parameters(), module.buffers())), None)
