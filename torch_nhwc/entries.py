"""Entries: hooks that bring the inputs of a model, or of modules inside of it, into a memory format.

Plain data inside, so that deepcopy and pickle take them. A saved module names this file: the class stays here.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_nhwc.formats import CHANNELS_LAST
from torch_nhwc.memory import with_canonical_strides

_RANKS = tuple(CHANNELS_LAST)


# What TorchScript compiles of a hook. It wants the types of all that forward takes: these are for one tensor, and leave
# those of one channel as they are.
def bring_images(self, input: tuple[Tensor]) -> tuple[Tensor]:  # type: ignore[no-untyped-def]
    return (brought(input[0], [4]),)


def bring_volumes(self, input: tuple[Tensor]) -> tuple[Tensor]:  # type: ignore[no-untyped-def]
    return (brought(input[0], [5]),)


def bring_images_and_volumes(self, input: tuple[Tensor]) -> tuple[Tensor]:  # type: ignore[no-untyped-def]
    return (brought(input[0], [4, 5]),)


def make_contiguous(self, input: tuple[Tensor]) -> tuple[Tensor]:  # type: ignore[no-untyped-def]
    return (_in_contiguous(input[0]) if _is_taken(input[0], [4, 5], []) else input[0],)


def _hook(scripted: Callable[..., Any]) -> Callable[..., Any]:
    """A method that is a hook, and the source of another function to TorchScript."""

    @functools.wraps(scripted)
    def hook(self: "InputFormat", module: nn.Module, arguments: Any, keywords: Any) -> Any:
        if _is_traced() and torch.onnx.is_in_onnx_export():  # where tensors have no strides
            return None
        return self.bring(arguments), self.bring(keywords)

    return hook


@dataclass(frozen=True)
class InputFormat:
    """Brings the images and volumes that a module is given into a memory format, in dicts, lists and tuples as well.

    Floating ones only, and none that is expanded. Containers without such a tensor stay the ones that they are.
    Gradients come back in the format that the tensor had.
    """

    ranks: tuple[int, ...] = _RANKS
    """Of the inputs that are brought into it; others are no images or volumes to the module's convolutions."""
    one_channel_ranks: tuple[int, ...] = _RANKS
    """Of those inputs that channels-last leaves as they are, or contiguous, where they have one channel."""
    memory_format: str = "channels_last"
    """`"channels_last"`, which is that of each input's rank, or `"contiguous_format"`."""
    is_shared: bool = False
    """Whether modules that are given one tensor share the copy, where neither was written to since."""

    bring_images = _hook(bring_images)
    bring_volumes = _hook(bring_volumes)
    bring_images_and_volumes = _hook(bring_images_and_volumes)
    make_contiguous = _hook(make_contiguous)

    @property
    def as_hook(self) -> Any:
        """What is registered: one of the methods, since TorchScript and pickle know a hook by its name."""
        if self.memory_format == "contiguous_format":
            return self.make_contiguous
        names = {(4,): "bring_images", (5,): "bring_volumes", (4, 5): "bring_images_and_volumes"}
        return getattr(self, names[self.ranks])

    def __call__(self, module: nn.Module, arguments: Any, keywords: Any) -> Any:
        """The hook of models that were saved when it was the object itself."""
        return self.as_hook(module, arguments, keywords)

    def bring(self, value: Any) -> Any:
        """A value as it enters the module."""
        if isinstance(value, Tensor):
            if not _is_taken(value, list(self.ranks), []):
                return value
            is_left = self.memory_format != "contiguous_format" and value.dim() in self.one_channel_ranks
            if is_left and value.size(1) == 1:  # in channels-last strides it would be what is to be avoided
                return _in_contiguous(value) if value.stride(1) == 1 else value
            return self._shared(value) if self.is_shared else in_format(value, self.memory_format)
        if type(value) is dict:
            items = {key: self.bring(each) for key, each in value.items()}
            return items if any(items[key] is not value[key] for key in value) else value
        if type(value) in (list, tuple):
            each = [self.bring(each) for each in value]
            return type(value)(each) if any(a is not b for a, b in zip(each, value)) else value
        return value

    def _shared(self, value: Tensor) -> Tensor:
        is_wrapped = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
        if is_wrapped or value.is_inference():
            return in_format(value, self.memory_format)
        # Kept by the tensor itself, so that both go together.
        kept = value.__dict__.setdefault("_nhwc_copies", {})
        key = self.memory_format, torch.is_grad_enabled()
        versions, copy = kept.get(key, (None, value))
        if versions != (value._version, copy._version):
            copy = in_format(value, self.memory_format)
            if copy is value:
                return value
            kept[key] = (value._version, copy._version), copy
        return copy  # type: ignore[no-any-return]

    def joined(self, other: "InputFormat | None") -> "InputFormat":
        """What does what both do, of channels-last."""
        if other is None:
            return self
        pairs = (self.ranks, other.ranks), (self.one_channel_ranks, other.one_channel_ranks)
        ranks, one_channel_ranks = (tuple(sorted({*one, *another})) for one, another in pairs)
        return InputFormat(ranks, one_channel_ranks)


def is_activation(value: Tensor) -> bool:
    """Whether a tensor is a batch of images or volumes that can be laid out in another format."""
    return _is_taken(value, list(_RANKS), [])


def brought(image: Tensor, ranks: list[int]) -> Tensor:
    """An image or volume of one of some ranks in channels-last, unless it has one channel; also in TorchScript."""
    return _in_channels_last(image) if _is_taken(image, ranks, ranks) else image


def can_be_laid_out(value: Tensor, ranks: list[int]) -> bool:
    """Whether a tensor is of one of these ranks, and has elements of its own whose order can be another."""
    if value.dim() not in ranks or value.layout != torch.strided or value.is_nested:
        return False
    return 0 not in value.stride()


def in_format(value: Tensor, memory_format: str) -> Tensor:
    """An activation in a format, by name, in canonical strides; itself where it has them."""
    if memory_format == "contiguous_format":
        return _in_contiguous(value)
    if torch._C._are_functorch_transforms_active() or _is_traced():
        return _in_channels_last(value)
    return with_canonical_strides(value.contiguous(memory_format=CHANNELS_LAST[value.dim()]))


def _is_traced() -> bool:
    """Whether `torch.jit.trace` or the older of the exporters to ONNX is looking on."""
    return not torch.compiler.is_compiling() and torch._C._is_tracing()


def _is_taken(image: Tensor, ranks: list[int], one_channel_ranks: list[int]) -> bool:
    if not image.is_floating_point() or not can_be_laid_out(image, ranks):
        return False
    return image.dim() not in one_channel_ranks or image.size(1) != 1


def _in_channels_last(image: Tensor) -> Tensor:
    """An image or volume in canonical strides, for `vmap`, which knows one memory format only, and for any sizes."""
    moved = image.movedim(1, -1).contiguous()
    return moved.flatten().view(moved.shape).movedim(-1, 1)


def _in_contiguous(image: Tensor) -> Tensor:
    dense = image.contiguous()
    return dense.flatten().view(dense.shape) if 1 in dense.shape else dense


def expect_hookable(module: nn.Module) -> None:
    """Raises a RuntimeError for a TorchScript module, which takes no hooks."""
    if isinstance(module, torch.jit.ScriptModule):
        raise RuntimeError(
            "torch_nhwc: a TorchScript module takes no hook that brings its inputs into channels-last: "
            "give it such inputs, make it the child of a torch.nn.Sequential, or convert its archive by convert_saved"
        )


def input_hook(module: nn.Module) -> InputFormat | None:
    """What brings a module's inputs into a format, or `None`."""
    return next(iter(_input_hooks(module).values()), None)


def set_input_hook(module: nn.Module, wanted: InputFormat | None, instead_of: InputFormat | None = None) -> None:
    """Puts a hook for inputs in the place of those that are there; `None` takes them away.

    One that is to stand instead of another does nothing where there is none: it was taken away since.
    """
    there = _input_hooks(module)
    if [*there.values()] == [wanted] or (instead_of is not None and not there):
        return
    if wanted is not None:
        expect_hookable(module)
        module.register_forward_pre_hook(wanted.as_hook, with_kwargs=True)
    for key in there:
        module._forward_pre_hooks.pop(key, None)
        module._forward_pre_hooks_with_kwargs.pop(key, None)


def _input_hooks(module: nn.Module) -> dict[int, InputFormat]:
    """By their keys: more than one where an exception came between two lines."""
    owners = {key: getattr(hook, "__self__", hook) for key, hook in module._forward_pre_hooks.items()}
    return {key: owner for key, owner in owners.items() if isinstance(owner, InputFormat)}
