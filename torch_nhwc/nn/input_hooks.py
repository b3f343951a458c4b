"""The hook that converts a model's inputs to channels-last.

It is plain data, so that deepcopy and pickle take it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_nhwc.layout import CHANNELS_LAST, in_format, is_convertible


# What TorchScript compiles of a hook: one function for each set of ranks, since it knows no value but the module's.
def convert_images(self, input: tuple[Tensor]) -> tuple[Tensor]:  # type: ignore[no-untyped-def]
    return (converted_input(input[0], [4]),)


def convert_volumes(self, input: tuple[Tensor]) -> tuple[Tensor]:  # type: ignore[no-untyped-def]
    return (converted_input(input[0], [5]),)


def convert_images_and_volumes(self, input: tuple[Tensor]) -> tuple[Tensor]:  # type: ignore[no-untyped-def]
    return (converted_input(input[0], [4, 5]),)


def converted_input(value: Tensor, ranks: list[int]) -> Tensor:
    """Return an input of one of some ranks in channels-last, unless it has one channel; also in TorchScript."""
    if not value.is_floating_point() or not is_convertible(value, ranks) or value.size(1) == 1:
        return value
    return in_format(value)


def _hook(scripted: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that is a hook, whose source is that of another function to TorchScript."""

    @functools.wraps(scripted)
    def hook(self: "InputHook", module: nn.Module, arguments: Any, keywords: Any) -> Any:
        is_traced = not torch.compiler.is_compiling() and torch._C._is_tracing()
        if is_traced and torch.onnx.is_in_onnx_export():  # where tensors have no strides
            return None
        return self.convert(arguments), self.convert(keywords)

    return hook


@dataclass(frozen=True)
class InputHook:
    """Converts a module's images and volumes to channels-last, in dicts, lists and tuples as well.

    Only floating-point tensors without expanded dimensions are converted. A container without one is passed on as it
    is.
    """

    ranks: tuple[int, ...] = tuple(CHANNELS_LAST)
    """The ranks of the inputs that are converted; others are no images or volumes to the module's convolutions."""
    one_channel_ranks: tuple[int, ...] = tuple(CHANNELS_LAST)
    """The ranks at which inputs of one channel stay as they are, or become contiguous."""

    convert_images = _hook(convert_images)
    convert_volumes = _hook(convert_volumes)
    convert_images_and_volumes = _hook(convert_images_and_volumes)

    @property
    def as_hook(self) -> Any:
        """The method that is registered: TorchScript and pickle know a hook by its name."""
        names = {(4,): "convert_images", (5,): "convert_volumes", (4, 5): "convert_images_and_volumes"}
        return getattr(self, names[self.ranks])

    def convert(self, value: Any) -> Any:
        """Return an argument as it enters the module."""
        if isinstance(value, Tensor):
            if not value.is_floating_point() or not is_convertible(value, list(self.ranks)):
                return value
            if value.dim() in self.one_channel_ranks and value.size(1) == 1:
                # In the strides of channels-last it would be what is to be avoided.
                return in_format(value, channels_last=False) if value.stride(1) == 1 else value
            return in_format(value)
        if type(value) is dict:
            items = {key: self.convert(each) for key, each in value.items()}
            return items if any(items[key] is not value[key] for key in value) else value
        if type(value) in (list, tuple):
            each = [self.convert(each) for each in value]
            return type(value)(each) if any(a is not b for a, b in zip(each, value)) else value
        return value

    def joined(self, other: "InputHook | None") -> "InputHook":
        """Return a hook that does what both do."""
        if other is None:
            return self
        pairs = (self.ranks, other.ranks), (self.one_channel_ranks, other.one_channel_ranks)
        return InputHook(*(tuple(sorted({*one, *another})) for one, another in pairs))


def expect_hookable(module: nn.Module) -> None:
    """Raise a RuntimeError for a TorchScript module, which takes no hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        raise RuntimeError(
            "torch_nhwc: a TorchScript module takes no hook that converts its inputs to channels-last: "
            "give it such inputs, make it the child of a torch.nn.Sequential, or convert its archive by convert_saved"
        )


def input_hook(module: nn.Module) -> InputHook | None:
    """Return the hook that converts a module's inputs, or `None`."""
    return next(iter(_input_hooks(module).values()), None)


def set_input_hook(module: nn.Module, wanted: InputHook | None, instead_of: InputHook | None = None) -> None:
    """Replace a module's input hooks by one, or remove them with `None`.

    One that replaces another does nothing where there is none: it was removed in the meantime.
    """
    present = _input_hooks(module)
    if [*present.values()] == [wanted] or (instead_of is not None and not present):
        return
    if wanted is not None:
        expect_hookable(module)
        module.register_forward_pre_hook(wanted.as_hook, with_kwargs=True)
    for key in present:
        module._forward_pre_hooks.pop(key, None)
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def _input_hooks(module: nn.Module) -> dict[int, InputHook]:
    """Return a module's input hooks by their keys: more than one where an exception came between two lines."""
    owners = {key: getattr(hook, "__self__", None) for key, hook in module._forward_pre_hooks.items()}
    return {key: owner for key, owner in owners.items() if isinstance(owner, InputHook)}
