"""Hooks that stay on modules, but for that of their inputs, and the last step of a parametrization.

They are plain data, so that deepcopy and pickle take them.
"""

import contextlib
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_nhwc.layout import Format, contiguous_copies
from torch_nhwc.nn.each_forward import converted
from torch_nhwc.nn.input_hooks import expect_hookable
from torch_nhwc.ops import convert_weight_
from torch_nhwc.rendering import warn


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
