"""Layers that convert their weight on its way to the convolution, in each forward: the parameter stays contiguous."""

import dis
import re
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode

from torch_nhwc.layout import CHANNELS_LAST, to_format
from torch_nhwc.nn.class_swap import Swap
from torch_nhwc.ops import convert_weight


class EachForward(Swap):
    """A layer that converts its weight in each forward.

    `swap_class(layer, EachForward)` makes one of a convolution, and of any layer that calls one in its forward.
    """

    prefix = "EachForward"
    order = 1

    @classmethod
    def mixin_for(cls, layer_type: type) -> type:
        """Return a class that overrides the method that is given the weight, or else the whole forward."""
        is_pytorch_s = any(
            getattr(layer_type, "forward", None) is layer.forward
            and getattr(layer_type, "_conv_forward", None) is layer._conv_forward
            for layer in (nn.Conv2d, nn.Conv3d)
        )
        return _InConvForward if is_pytorch_s else _InForward

    def __prepare_scriptable__(self) -> None:
        raise RuntimeError(
            "torch_nhwc: torch.jit.script takes no layer that converts its weight in each forward: use "
            "torch.jit.trace, or revert, script the model, and apply convert_ to the result"
        )


def is_in_each_forward(layer_type: type) -> bool:
    """Return whether layers of a class convert their weight in each forward."""
    return issubclass(layer_type, EachForward)


def views_weight(layer: nn.Module) -> bool:
    """Return whether a convolution's own code takes a `view` of a weight by name, which raises for channels-last."""
    if isinstance(layer, _ConvNd):
        for each in type(layer).__mro__:
            if each.__module__.startswith("torch."):
                break
            codes = (getattr(value, "__code__", None) for value in vars(each).values())
            for before, step in (pair for code in codes if code for pair in pairwise(dis.get_instructions(code))):
                if step.argval == "view" and re.search(r"\b(w|\w*weight)\b", str(before.argval)):
                    return True
    return False


class _InConvForward(EachForward):
    """For a layer with PyTorch's forward, which passes the weight to a method."""

    groups: int

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight_for(weight, self.groups), bias)  # type: ignore[misc]


class _InForward(EachForward):
    """For any other layer: the functions that it calls in its forward are intercepted."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _ConvertingWeights():
            return super().forward(*args, **kwargs)  # type: ignore[misc]


# By function: the position of its argument `groups`.
_CONVOLUTIONS: dict[Any, int] = {
    F.conv2d: 6,
    F.conv3d: 6,
    F.conv_transpose2d: 6,
    F.conv_transpose3d: 6,
    torch.ops.nhwc.conv2d: 6,
    torch.ops.nhwc.conv3d: 6,
    torch.ops.nhwc.conv_transpose2d: 6,
    torch.ops.nhwc.conv_transpose3d: 6,
    torch.convolution: 8,
}


class _ConvertingWeights(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = converting_weight(func, args, kwargs or {})
        return func(*args, **kwargs)


def converting_weight(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of a call, with the weight in channels-last if it is of a convolution."""
    position = _CONVOLUTIONS.get(func)
    if position is None:
        return args, kwargs
    groups = args[position] if len(args) > position else kwargs.get("groups", 1)
    if "weight" in kwargs:
        return args, kwargs | {"weight": weight_for(kwargs["weight"], groups)}
    input, weight, *others = args
    return (input, weight_for(weight, groups), *others), kwargs


def weight_for(weight: Tensor, groups: int) -> Tensor:
    """Return the channels-last weight for a convolution: the same object, or a view, where no bytes have to move.

    Filters of one channel stay contiguous, for the reason that `Format.of_filters` gives. Otherwise autocast's cast and
    the conversion are one pass.
    """
    if not isinstance(weight, Tensor):  # a proxy of torch.fx
        return torch.ops.nhwc.convert_weight(weight)
    memory_format = CHANNELS_LAST.get(weight.dim())
    if memory_format is None:
        return weight
    if groups == 1 and _channels_of(weight) == 1:
        return to_format(weight, channels_last=False)
    dtype = _dtype_of_autocast(weight)
    if dtype is None and _is_in_order(weight, memory_format):
        return to_format(weight)
    return converted(weight, memory_format, dtype)


def converted(weight: Tensor, memory_format: torch.memory_format, dtype: torch.dtype | None = None) -> Tensor:
    """Return a converted copy of a weight, in the dtype that autocast has for it.

    What is exported may have to run without our operator, so PyTorch's makes it there, and autocast casts it.
    """
    is_exported = torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None
    if is_exported:
        return weight.clone(memory_format=memory_format)
    return convert_weight(weight, memory_format, dtype=dtype)


def _channels_of(weight: Tensor) -> int:
    """Return the channels of a filter, without a warning from a tracer, for which sizes are tensors."""
    tracing = None if torch.compiler.is_compiling() else torch._C._get_tracing_state()
    if tracing is None:
        return weight.shape[1]
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        return weight.shape[1]
    finally:
        torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def _is_in_order(weight: Tensor, memory_format: torch.memory_format) -> bool:
    """Return whether no bytes have to move; for other tensors than parameters, as far as `torch.vmap` answers."""
    if type(weight) is nn.Parameter:
        return weight.is_contiguous(memory_format=memory_format)
    is_either = type(weight) is Tensor and 1 in (weight.shape[1], weight.shape[2:].numel())
    return is_either and weight.is_contiguous()


def _dtype_of_autocast(weight: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast would cast a weight to; `None` where it stays, or where only autocast knows."""
    device = weight.device.type
    if torch._C._are_functorch_transforms_active():
        return None
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    dtype = torch.get_autocast_dtype(device)
    stays = weight.dtype in (dtype, torch.float64) or not weight.is_floating_point()
    return None if stays else dtype
