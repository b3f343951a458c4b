"""Forwards of other packages' layers, with the functions of `torch_nhwc.functional` in the place of PyTorch's."""

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_nhwc import functional
from torch_nhwc.layout import Format
from torch_nhwc.nn.each_forward import converting_weight, is_in_each_forward

_OURS = {getattr(F, name): getattr(functional, name) for name in functional.__all__}


def with_our_functions(layer_type: type) -> Callable[..., Any]:
    """Return the forward of a layer's class, which calls our functions wherever it calls PyTorch's.

    A weight that it computes gets the format of the layer's own weight on its way to the convolution. TorchScript
    compiles the source of what the result wraps, and looks its names up in the globals of the result: there, `F` has
    our functions as well.
    """
    own: Any = layer_type.forward  # type: ignore[attr-defined]

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with mode(has_channels_last_weight(self)):
            return own(self, *args, **kwargs)

    mode, has_channels_last_weight = _CallingOurs, _has_channels_last_weight  # not globals, which are those of `own`
    names = {name: _scripted_functions() if value is F else value for name, value in own.__globals__.items()}
    bound = FunctionType(forward.__code__, names, own.__name__, closure=forward.__closure__)
    bound.__wrapped__ = own  # type: ignore[attr-defined]
    return bound


class _CallingOurs(TorchFunctionMode):
    def __init__(self, converts_weights: bool) -> None:
        super().__init__()
        self.converts_weights = converts_weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.converts_weights:
            args, kwargs = converting_weight(func, args, kwargs or {})
        return _OURS.get(func, func)(*args, **(kwargs or {}))


def _has_channels_last_weight(layer: nn.Module) -> bool:
    """Return whether the weights of a convolution are to be channels-last, computed ones too."""
    weight = layer._parameters.get("weight")
    if is_in_each_forward(type(layer)):
        return True
    return weight is not None and weight.dim() > 3 and weight.stride() == Format(None).strides(weight.shape)


def _scripted_functions() -> ModuleType:
    """Return `torch.nn.functional` with our functions, for TorchScript, in which a padding by name has its own type."""
    module = ModuleType(F.__name__)
    vars(module).update(vars(F))
    for name in functional.__all__:
        setattr(module, name, getattr(torch.ops.nhwc if name.startswith("conv") else functional, name))
    return module
