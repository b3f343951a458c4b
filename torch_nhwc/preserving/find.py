"""The layers of a model that lose on channels-last, and what stands in the way of exchanging one."""

from itertools import chain
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from torch_nhwc.each_forward import exchange as each_forward
from torch_nhwc.modules.walk import walk
from torch_nhwc.preserving.exchange import is_exchanged, stock_of
from torch_nhwc.preserving.losing import LOSSES, Loss, is_known, loss_of
from torch_nhwc.reasons import Reason

# The methods that a class here overrides; one that was put on the layer itself would still be called.
_METHODS = ("forward", "_conv_forward", "_apply_instance_norm")


def _methods_of(layer_type: type) -> list[object]:
    return [getattr(layer_type, name, None) for name in _METHODS]


# As PyTorch has them: a package may put another in their place, for all layers of a class.
_STOCK_METHODS = {layer_type: _methods_of(layer_type) for layer_type in LOSSES}


class Layer(NamedTuple):
    """A layer that loses on channels-last."""

    path: str
    module: nn.Module
    kind: str
    """Its class, as its package has it."""
    loses: str
    reason: Reason | None
    """Why it cannot be exchanged, or needs not to be."""


def find_layers(model: nn.Module) -> list[Layer]:
    """The layers of a model that lose, in its order."""
    found = []
    losses: dict[type, Loss | None] = {}  # of the model's classes, which are few
    elsewhere = _device_of(model)
    for path, module, wrapped in walk(model):
        layer_type = _becomes(module) or type(module)
        if layer_type not in losses:
            of_base = None if issubclass(layer_type, torch.jit.ScriptModule) else loss_of(layer_type)
            losses[layer_type] = of_base and of_base[1]
        loss = losses[layer_type]
        # An exchanged layer has its row whatever its arguments are by now: it is to be found, and brought back.
        if loss is not None and (is_exchanged(layer_type) or loss.concerns(module)):
            stock = _unparametrized(module, layer_type)
            reason = _reason_of(module, stock, loss, elsewhere)
            if wrapped is not None and reason is not Reason.EXCHANGED:
                reason = wrapped
            found.append(Layer(path, module, stock.__name__, loss.loses, reason))
    return found


def _becomes(module: nn.Module) -> type[nn.Module] | None:
    """The class that a lazy layer has after its first forward; `None` of others."""
    return module.cls_to_become if isinstance(module, LazyModuleMixin) else None


def _unparametrized(module: nn.Module, layer_type: type) -> type:
    stock = stock_of(layer_type)
    is_made = parametrize.is_parametrized(module) and stock is layer_type
    return each_forward.stock_of(stock.__bases__[0] if is_made else stock)


def _reason_of(module: nn.Module, stock: type, loss: Loss, elsewhere: torch.device | None) -> Reason | None:
    if is_exchanged(type(module)):
        return Reason.EXCHANGED
    if _becomes(module) is not None:
        return Reason.LAZY_LAYER
    if not is_known(stock):
        return Reason.OTHER_CLASS
    is_patched = any(_methods_of(base) != _STOCK_METHODS[base] for base in stock.__mro__ if base in LOSSES)
    if is_patched or any(name in module.__dict__ for name in _METHODS):
        return Reason.FORWARD_REPLACED
    if not loss.serves(module):
        return Reason.OTHER_ARGUMENTS
    device = _device_of(module) or elsewhere
    is_measured = device is None or device.type in ("cpu", "meta")
    return None if is_measured else Reason.OTHER_DEVICE


def _device_of(module: nn.Module) -> torch.device | None:
    """Where a module's first tensor is."""
    return next((tensor.device for tensor in chain(module.parameters(), module.buffers())), None)
