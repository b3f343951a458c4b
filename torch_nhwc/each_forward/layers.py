"""The classes that come before a layer's own, and take the weight on its way to the convolution."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torch_nhwc.each_forward.weights import in_channels_last

_CONVOLUTIONS = frozenset(
    (F.conv2d, F.conv3d, F.conv_transpose2d, F.conv_transpose3d, torch.convolution, torch.ops.nhwc.conv3d)
)


class EachForward:
    """What such layers have in common, so that one is known by its class."""

    def __prepare_scriptable__(self) -> None:
        raise RuntimeError(
            "torch_nhwc: torch.jit.script takes no layer that converts its weight in each forward: use "
            "torch.jit.trace, or revert, script the model, and convert_ what comes out"
        )


class InConvForward(EachForward):
    """For a layer whose forward is PyTorch's, which hands the weight to a method."""

    groups: int

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolved: Tensor = super()._conv_forward(input, in_channels_last(weight, self.groups), bias)  # type: ignore[misc]
        return convolved


class InForward(EachForward):
    """For any other: the functions that it calls in its forward are watched."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with _ConvertingWeights():
            return super().forward(*args, **kwargs)  # type: ignore[misc]


class _ConvertingWeights(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CONVOLUTIONS:
            place = 8 if func is torch.convolution else 6
            groups = args[place] if len(args) > place else kwargs.get("groups", 1)
            if "weight" in kwargs:
                kwargs = kwargs | {"weight": in_channels_last(kwargs["weight"], groups)}
            else:
                input, weight, *others = args
                args = input, in_channels_last(weight, groups), *others
        return func(*args, **kwargs)


def mixin_for(layer_type: type[nn.Module]) -> type[EachForward]:
    """Which of the two a class needs."""
    is_stock = any(
        layer_type.forward is layer.forward and layer_type._conv_forward is layer._conv_forward
        for layer in (nn.Conv2d, nn.Conv3d)
        if issubclass(layer_type, layer)
    )
    return InConvForward if is_stock else InForward
