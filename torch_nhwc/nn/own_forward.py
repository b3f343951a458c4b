"""Forwards of other packages' layers, with the functions of `torch_nhwc.functional` in the place of PyTorch's."""

import builtins
import dis
import functools
import inspect
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.overrides import TorchFunctionMode

from torch_nhwc import functional
from torch_nhwc.layout import Format
from torch_nhwc.nn import pending
from torch_nhwc.nn.each_forward import converting_weight, is_in_each_forward

_OURS = {getattr(F, name): getattr(functional, name) for name in functional.__all__}

# `torch.nn.functional` with our functions, norms whose results wait, and the operators of convolutions: in TorchScript,
# where alone they are called by it, a padding by name has a type of its own. An interpolation there takes lists alone.
_F = ModuleType(F.__name__)
vars(_F).update({name: getattr(functional, name) for name in functional.__all__})
vars(_F).update({name: getattr(torch.ops.nhwc, name) for name in functional.__all__ if name.startswith("conv")})
vars(_F).update({name: getattr(pending, name) for name in ("batch_norm", "group_norm")})
del vars(_F)["interpolate"]
_CONVOLVED = {F.conv2d: ("conv2d", 2), F.conv3d: ("conv3d", 3)}
_F.__getattr__ = functools.partial(getattr, F)  # type: ignore[method-assign]


def with_our_functions(layer_type: type) -> Callable[..., Any]:
    """Return the forward of a layer's class, which calls our functions wherever it calls PyTorch's.

    A norm's has them among its globals, which costs nothing in a call. A mode looks at all calls where that may not
    reach one, and for convolutions: a weight that is computed gets the format of the layer's own weight on its way.
    TorchScript compiles the source of what the result wraps, with the globals of the result.
    """
    own: Any = layer_type.forward  # type: ignore[attr-defined]
    bound = _bound(own, layer_type)
    if bound is not None and bound is not own:
        return bound

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with mode(self):
            return own(self, *args, **kwargs)

    mode = _CallingOurs  # not a global, which are those of `own`
    names = {name: _with_ours(value) for name, value in own.__globals__.items()}
    return functools.update_wrapper(FunctionType(forward.__code__, names, closure=forward.__closure__), own)


def _with_ours(value: Any) -> Any:
    """Return our module or function where a value is PyTorch's."""
    if isinstance(value, FunctionType | BuiltinFunctionType) and value in _OURS:
        return getattr(_F, value.__name__)
    return _F if value is F else value


def _bound(own: Any, layer_type: type, depth: int = 2) -> Any:
    """Return a function with ours among its globals, and among those of functions that it calls; itself without any.

    `None` where it may call PyTorch's by another way. The globals are a copy: none may be one that is set anew, as a
    flag of a package is.
    """
    code, steps = own.__code__, [(step.opname, step.argval) for step in dis.get_instructions(own)]
    names = {name: own.__globals__.get(name, vars(builtins).get(name)) for step, name in steps if step == "LOAD_GLOBAL"}
    others = set(code.co_names) - names.keys()
    if (
        own.__closure__  # `super`, or the function that a decorator was given
        or any(isinstance(each, CodeType) for each in code.co_consts)
        or any(step.startswith(("IMPORT", "STORE_GLOBAL")) for step, _ in steps)
        or any(name == "functional" or "conv" in name or _is_method(layer_type, name) for name in others)
    ):
        return None
    ours = {name: _with_ours(value) for name, value in names.items()}
    for name, value in names.items():
        if ours[name] is value and _package_of(value) not in {"torch", *sys.stdlib_module_names}:
            ours[name] = _bound(value, layer_type, depth - 1) if depth and isinstance(value, FunctionType) else None
            if ours[name] is None:
                return None
    if all(ours[name] is value for name, value in names.items()):
        return own
    copied = {name: value for name, value in own.__globals__.items() if name != "__name__"}  # of a module for compilers
    bound = FunctionType(code, copied | ours, own.__name__, own.__defaults__)
    bound.__kwdefaults__ = own.__kwdefaults__
    return functools.update_wrapper(bound, own)


def _package_of(value: Any) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0]


def _is_method(layer_type: type, name: str) -> bool:
    """Return whether a class has a method or property of a name that may call our functions."""
    value = inspect.getattr_static(layer_type, name, None)
    is_plain = name == "_check_input_dim" and _package_of(value) == "torch"
    return hasattr(value, "__get__") and not is_plain and value is not vars(nn.Module).get(name)


class _CallingOurs(TorchFunctionMode):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.converts_weights = layer, _has_channels_last_weight(layer)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.converts_weights:
            args, kwargs = converting_weight(func, args, kwargs)
        result = None
        if func is F.pad and isinstance(self.layer, nn.Conv2d | nn.Conv3d):
            result = pending.padded_by_layer(self.layer, *args, **kwargs)
        elif func in _CONVOLVED and not kwargs:
            result = pending.convolved_by_layer(self.layer, *_CONVOLVED[func], *args)
        return _OURS.get(func, func)(*args, **kwargs) if result is None else result


def _has_channels_last_weight(layer: nn.Module) -> bool:
    """Return whether the weights of a convolution are to be channels-last, computed ones too."""
    weight = layer._parameters.get("weight")
    if is_in_each_forward(type(layer)):
        return True
    return weight is not None and weight.dim() > 3 and weight.stride() == Format(None).strides(weight.shape)
