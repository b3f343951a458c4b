"""Forward pre-hooks that a conversion leaves on modules. Plain data inside, so that deepcopy and pickle take them."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from torch_nhwc.ops import convert_weight_


class ConvertWhenMaterialised:
    """Converts a lazy layer's weight at the first forward, behind the hook that makes it, and is gone."""

    def __call__(self, module: nn.Module, _: object) -> None:
        weight: Any = module.weight
        if not is_lazy(weight):
            convert_weight_(weight)
            remove_hook(module, self)


class ChannelsLastInput:
    """Brings 4D and 5D inputs into channels-last at the entry of a model."""

    def __call__(self, module: nn.Module, arguments: Any, keywords: Any) -> Any:
        return pytree.tree_map_only(Tensor, _to_channels_last, (arguments, keywords))


def _to_channels_last(tensor: Tensor) -> Tensor:
    if tensor.dim() == 4:
        return tensor.contiguous(memory_format=torch.channels_last)
    if tensor.dim() == 5:
        return tensor.contiguous(memory_format=torch.channels_last_3d)
    return tensor


def add_hook(module: nn.Module, hook: Any) -> None:
    """Registers one of the hooks above, unless it is there already.

    Raises:
        RuntimeError: a TorchScript module takes none.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise RuntimeError(
            "torch_nhwc: a TorchScript module takes no hook that brings its inputs into channels-last: "
            "give it such inputs, or make it the child of a torch.nn.Sequential"
        )
    if hook in module._forward_pre_hooks.values():
        return
    module.register_forward_pre_hook(hook, with_kwargs=isinstance(hook, ChannelsLastInput))


def find_hook(module: nn.Module, hook_type: type) -> Any:
    """The hook of a type on a module, or `None`."""
    return next((hook for hook in module._forward_pre_hooks.values() if type(hook) is hook_type), None)


def remove_hook(module: nn.Module, hook: Any) -> None:
    """Takes a hook away, if it is still there."""
    for key in [key for key, each in module._forward_pre_hooks.items() if each is hook]:
        module._forward_pre_hooks.pop(key, None)
        module._forward_pre_hooks_with_kwargs.pop(key, None)
