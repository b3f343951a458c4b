"""What a conversion leaves on modules: hooks, and the last step of a parametrization.

They hold plain data, so that deepcopy and pickle take them.
"""

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_nhwc.layout import CHANNELS_LAST, Format, contiguous_copies, is_convertible, to_format
from torch_nhwc.nn.each_forward import converted
from torch_nhwc.ops import convert_weight_
from torch_nhwc.rendering import warn


# TorchScript compiles these functions in place of the hook. There is one for each set of ranks, with and without inputs
# of one channel, since a compiled hook can read no attributes except the module's.
def _convert_images(self, input: tuple[Tensor]) -> tuple[Tensor]:  # type: ignore[no-untyped-def]
    return (converted_input(input[0], [4], 1),)


def _convert_volumes(self, input: tuple[Tensor]) -> tuple[Tensor]:  # type: ignore[no-untyped-def]
    return (converted_input(input[0], [5], 1),)


def _convert_images_and_volumes(self, input: tuple[Tensor]) -> tuple[Tensor]:  # type: ignore[no-untyped-def]
    return (converted_input(input[0], [4, 5], 1),)


def _convert_images_of_channels(self, input: tuple[Tensor]) -> tuple[Tensor]:  # type: ignore[no-untyped-def]
    return (converted_input(input[0], [4]),)


def _convert_volumes_of_channels(self, input: tuple[Tensor]) -> tuple[Tensor]:  # type: ignore[no-untyped-def]
    return (converted_input(input[0], [5]),)


def _convert_images_and_volumes_of_channels(self, input: tuple[Tensor]) -> tuple[Tensor]:  # type: ignore[no-untyped-def]
    return (converted_input(input[0], [4, 5]),)


def converted_input(value: Tensor, ranks: list[int], least: int = 2) -> Tensor:
    """Return an input of one of some ranks, and at least as many channels, in channels-last; also in TorchScript."""
    if not value.is_floating_point() or not is_convertible(value, ranks) or value.size(1) < least:
        return value
    return to_format(value)


def _hook(scripted: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that is a hook, whose source is that of another function to TorchScript."""

    @functools.wraps(scripted)
    def hook(self: "InputHook", module: nn.Module, arguments: Any, keywords: Any) -> Any:
        is_traced = not torch.compiler.is_compiling() and torch._C._is_tracing()
        if is_traced and torch.onnx.is_in_onnx_export():  # where tensors have no strides
            return None
        return self.convert(arguments), self.convert(keywords) if keywords else keywords

    return hook


@dataclass(frozen=True)
class InputHook:
    """Converts a module's images and volumes to channels-last, in dicts, lists and tuples as well.

    Only floating-point tensors without expanded dimensions are converted. A container without one is passed on
    unchanged.
    """

    ranks: tuple[int, ...] = tuple(CHANNELS_LAST)
    """The ranks of the inputs that are converted; others are no images or volumes to the module's convolutions."""
    one_channel_ranks: tuple[int, ...] = tuple(CHANNELS_LAST)
    """The ranks at which inputs of one channel stay as they are, or become contiguous; in TorchScript all, if any."""

    _convert_images = _hook(_convert_images)
    _convert_volumes = _hook(_convert_volumes)
    _convert_images_and_volumes = _hook(_convert_images_and_volumes)
    _convert_images_of_channels = _hook(_convert_images_of_channels)
    _convert_volumes_of_channels = _hook(_convert_volumes_of_channels)
    _convert_images_and_volumes_of_channels = _hook(_convert_images_and_volumes_of_channels)

    @property
    def as_hook(self) -> Any:
        """The method that is registered: TorchScript and pickle know a hook by its name."""
        names = {(4,): "_convert_images", (5,): "_convert_volumes", (4, 5): "_convert_images_and_volumes"}
        return getattr(self, f"{names[self.ranks]}{'_of_channels' if self.one_channel_ranks else ''}")

    def convert(self, value: Any) -> Any:
        """Return an argument as it enters the module."""
        if isinstance(value, Tensor):
            if not value.is_floating_point() or not is_convertible(value, list(self.ranks)):
                return value
            if value.dim() in self.one_channel_ranks and value.size(1) == 1:
                # In the strides of channels-last it would be what is to be avoided.
                return to_format(value, channels_last=False) if value.stride(1) == 1 else value
            return to_format(value)
        if type(value) is dict:
            items = {key: self.convert(each) for key, each in value.items()}
            return items if any(items[key] is not value[key] for key in value) else value
        if type(value) in (list, tuple):
            each = [self.convert(each) for each in value]
            return value if all(map(is_, each, value)) else type(value)(each)
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
            "give it such inputs, make it the child of a torch.nn.Sequential, or convert its archive by "
            "torch_nhwc.convert_saved"
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


class ConvertWhenMaterialised:
    """Converts a lazy layer's weight as soon as it exists: when it is loaded, or in the first forward.

    It runs after the hook that makes the weight, once. A weight that cannot be converted stays as it is: that is a
    warning and never an error, which would leave a model half loaded.
    """

    def __call__(self, module: Any, given: object) -> None:
        weight = module.weight
        if is_lazy(weight):
            return
        # PyTorch's loop over the hooks that run after loading, which get no tuple, allows no change before its end.
        if type(given) is tuple or next(reversed(module._load_state_dict_post_hooks.values())) is self:
            remove_hook(module, self)
        wanted = Format(None).of_filters(weight.shape[1], module.groups)
        if weight.stride() == wanted.strides(weight.shape):
            return
        try:
            convert_weight_(weight, wanted.for_operators)
        except RuntimeError as error:  # wrapped, traced, in a flat buffer
            left = f"the weight of the layer {module}, which was lazy, stays as it is: {error}"
            with contextlib.suppress(UserWarning):  # where warnings are errors, loading goes on all the same
                warn(f"torch_nhwc: {left}")


class LayOut(nn.Module):
    """The last step of a parametrization: converts the weight to a memory format."""

    def __init__(self, memory_format: str) -> None:
        super().__init__()
        self.memory_format = memory_format  # a name, since deepcopy does not take a torch.memory_format

    def forward(self, weight: Tensor) -> Tensor:
        return converted(weight, getattr(torch, self.memory_format))

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


class LayOutHook:
    """Does the same after the hooks of weight_norm, spectral_norm and pruning, while they compute the weight."""

    def __init__(self, memory_format: str) -> None:
        self.memory_format = memory_format

    def __call__(self, module: Any, _: object) -> None:
        if "weight" in module._parameters:
            remove_hook(module, self)
        else:
            module.weight = converted(module.weight, getattr(torch, self.memory_format))


class ContiguousStateDict:
    """Makes the tensors of a module's state dicts contiguous, whoever requests them.

    PyTorch's own share the memory of the model, so that code which averages or loads weights may write to them.
    Writing to a copy has no effect on the model: that is a warning.
    """

    def __init__(self) -> None:
        self.generation = 0  # of state dicts: once the model is loaded, writes to earlier ones do not matter

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: object) -> None:
        given = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}  # as keep_vars=True gives them
        contiguous = contiguous_copies()
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in list(state_dict.items()):
                if name.startswith(prefix) and isinstance(tensor, Tensor) and id(tensor) not in given:
                    state_dict[name] = contiguous(tensor)
                    if state_dict[name] is not tensor and type(tensor) is Tensor:
                        self._watch(state_dict[name], name)

    def loaded(self, *_: object) -> None:
        """Note that the module has been loaded, with whatever was written to its state dict."""
        self.generation += 1

    def _watch(self, copy: Tensor, name: str) -> None:
        counter = copy.detach()  # shares the version, which counts the writes to the copy
        counter.data = counter.new_empty(0)  # and does not keep its memory
        ending = weakref.finalize(copy, self._warn_if_written, counter, counter._version, name, self.generation)
        ending.atexit = False

    def _warn_if_written(self, counter: Tensor, version: int, name: str, generation: int) -> None:
        if counter._version != version and generation == self.generation:
            self.generation += 1  # once for all tensors of a state dict
            warnings.warn(
                f"torch_nhwc: {name!r} of a state dict was written to, which does not change the model: "
                "contiguous_checkpoints_ makes state dicts of copies. Write to the parameters, load the state dict, or "
                "remove the hook from a model that is averaged by contiguous_checkpoints_(model).remove()",
                UserWarning,
                stacklevel=1,
            )


def add_hook(module: nn.Module, hook: Any) -> None:
    """Register one of the hooks above wherever it is not registered yet: an exception may have come in between."""
    expect_hookable(module)
    if hook not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(hook)
    if isinstance(hook, ConvertWhenMaterialised) and hook not in module._load_state_dict_post_hooks.values():
        module.register_load_state_dict_post_hook(hook)  # type: ignore[no-untyped-call, unused-ignore]


def find_hook(module: nn.Module, hook_type: type) -> Any:
    """Return the hook of a type on a module, or `None`."""
    return next((hook for hook in module._forward_pre_hooks.values() if type(hook) is hook_type), None)


def state_dict_hook_key(module: nn.Module) -> int | None:
    """Return the key, among a module's state-dict hooks, of the one that makes its state dicts contiguous."""
    return next((key for key, hook in module._state_dict_hooks.items() if type(hook) is ContiguousStateDict), None)


def remove_hook(module: nn.Module, hook: Any) -> None:
    """Remove a hook, if the module still has it."""
    for hooks in (module._forward_pre_hooks, module._load_state_dict_post_hooks):
        for key in [key for key, each in hooks.items() if each is hook]:
            hooks.pop(key, None)
            module._forward_pre_hooks_with_kwargs.pop(key, None)
