"""All that a conversion leaves on modules: hooks, and the last step of a parametrization.

Plain data inside, so that deepcopy and pickle take them. A saved module names this file: its classes stay here.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_nhwc.formats import CHANNELS_LAST
from torch_nhwc.memory import with_canonical_strides
from torch_nhwc.ops import convert_weight, convert_weight_


class ConvertWhenMaterialised:
    """Converts a lazy layer's weight at the first forward, behind the hook that makes it, and is gone."""

    def __call__(self, module: nn.Module, _: object) -> None:
        weight: Any = module.weight
        if not is_lazy(weight):
            convert_weight_(weight)
            remove_hook(module, self)


class ChannelsLastInput:
    """Brings 4D and 5D inputs into channels-last at the entry of a model, in dicts, lists and tuples as well.

    Floating ones only, and none that is expanded. Containers without such a tensor stay the ones that they are.
    """

    def __call__(self, module: nn.Module, arguments: Any, keywords: Any) -> Any:
        return _to_channels_last(arguments), _to_channels_last(keywords)


def _to_channels_last(value: Any) -> Any:
    if isinstance(value, Tensor):
        is_image = value.dim() in CHANNELS_LAST and value.is_floating_point() and value.layout == torch.strided
        if not is_image or 0 in value.stride():
            return value
        return with_canonical_strides(value.contiguous(memory_format=CHANNELS_LAST[value.dim()]))
    if type(value) is dict:
        items = {key: _to_channels_last(each) for key, each in value.items()}
        return items if any(items[key] is not value[key] for key in value) else value
    if type(value) in (list, tuple):
        each = [_to_channels_last(each) for each in value]
        return type(value)(each) if any(a is not b for a, b in zip(each, value)) else value
    return value


class LayOut(nn.Module):
    """The last step of a parametrization: brings the weight into a memory format."""

    def __init__(self, memory_format: str) -> None:
        super().__init__()
        self.memory_format = memory_format  # a name, since deepcopy does not take a torch.memory_format

    def forward(self, weight: Tensor) -> Tensor:
        return convert_weight(weight, getattr(torch, self.memory_format))

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


class LayOutHook:
    """The same behind the hooks of weight_norm, spectral_norm and pruning; gone once the weight is a parameter."""

    def __init__(self, memory_format: str) -> None:
        self.memory_format = memory_format

    def __call__(self, module: Any, _: object) -> None:
        if "weight" in module._parameters:
            remove_hook(module, self)
        else:
            module.weight = convert_weight(module.weight, getattr(torch, self.memory_format))


def add_hook(module: nn.Module, hook: Any) -> None:
    """Registers one of the hooks above, unless it is there already."""
    expect_hookable(module)
    if hook in module._forward_pre_hooks.values():
        return
    module.register_forward_pre_hook(hook, with_kwargs=isinstance(hook, ChannelsLastInput))


def expect_hookable(module: nn.Module) -> None:
    """Raises a RuntimeError for a TorchScript module, which takes no hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        raise RuntimeError(
            "torch_nhwc: a TorchScript module takes no hook that brings its inputs into channels-last: "
            "give it such inputs, or make it the child of a torch.nn.Sequential"
        )


def find_hook(module: nn.Module, hook_type: type) -> Any:
    """The hook of a type on a module, or `None`."""
    return next((hook for hook in module._forward_pre_hooks.values() if type(hook) is hook_type), None)


def remove_hook(module: nn.Module, hook: Any) -> None:
    """Takes a hook away, if it is still there."""
    for key in [key for key, each in module._forward_pre_hooks.items() if each is hook]:
        module._forward_pre_hooks.pop(key, None)
        module._forward_pre_hooks_with_kwargs.pop(key, None)
