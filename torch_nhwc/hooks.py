"""What is left on modules, but for what brings their inputs into a format: hooks, and a parametrization's last step.

Plain data inside, so that deepcopy and pickle take them. A saved module names this file: its classes stay here.
"""

import contextlib
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torch_nhwc.entries import InputFormat, expect_hookable
from torch_nhwc.formats import Format
from torch_nhwc.memory import contiguous_copies
from torch_nhwc.ops import convert_weight, convert_weight_
from torch_nhwc.rendering import warn

ChannelsLastInput = InputFormat  # its name in models that were saved whole when it was here


class ConvertWhenMaterialised:
    """Converts a lazy layer's weight as it comes: when it is loaded, or in the first forward.

    There it runs behind the hook that makes the weight, and is gone. A weight that has come otherwise, and cannot be
    converted by then, stays as it is: a warning says so, and is never an error, behind which loading would be
    half done.
    """

    def __call__(self, module: Any, given: object) -> None:
        weight = module.weight
        if is_lazy(weight):
            return
        # PyTorch's loop over the hooks behind loading, which give no tuple, allows no change before its end.
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
    """The last step of a parametrization: brings the weight into a memory format."""

    def __init__(self, memory_format: str) -> None:
        super().__init__()
        self.memory_format = memory_format  # a name, since deepcopy does not take a torch.memory_format

    def forward(self, weight: Tensor) -> Tensor:
        return laid_out(weight, getattr(torch, self.memory_format))

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
            module.weight = laid_out(module.weight, getattr(torch, self.memory_format))


def laid_out(weight: Tensor, memory_format: torch.memory_format, dtype: torch.dtype | None = None) -> Tensor:
    """A weight in a memory format, and in the dtype that autocast has for it.

    By PyTorch's own operator, which leaves the dtype to autocast, where what is exported may have to do without ours.
    """
    is_exported = torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None
    if is_exported:
        return weight.clone(memory_format=memory_format)
    return convert_weight(weight, memory_format, dtype=dtype)


class ContiguousStateDict:
    """Makes the tensors of a module's state dicts contiguous, whoever asks for them.

    PyTorch's own share the memory of the model, so that code which averages or loads weights may write to them: to a
    copy it would do so in vain, and is told.
    """

    def __init__(self) -> None:
        self.generation = 0  # of state dicts: with the next one, what was written to earlier ones does not matter

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, _: object) -> None:
        given = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}  # as keep_vars=True asks for them
        contiguous = contiguous_copies()
        with torch.inference_mode(False), torch.no_grad():
            for name, tensor in list(state_dict.items()):
                if name.startswith(prefix) and isinstance(tensor, Tensor) and id(tensor) not in given:
                    state_dict[name] = contiguous(tensor)
                    if state_dict[name] is not tensor and type(tensor) is Tensor:
                        self._watch(state_dict[name], name)

    def loaded(self, *_: object) -> None:
        """Notes that the module has been loaded, with whatever was written to its state dict."""
        self.generation += 1

    def _watch(self, copy: Tensor, name: str) -> None:
        counter = copy.detach()  # counts what is written to the copy
        counter.data = counter.new_empty(0)  # and does not keep its memory
        ending = weakref.finalize(copy, self._tell_if_written, counter, counter._version, name, self.generation)
        ending.atexit = False

    def _tell_if_written(self, counter: Tensor, version: int, name: str, generation: int) -> None:
        if counter._version != version and generation == self.generation:
            self.generation += 1  # once for all tensors of a state dict
            warnings.warn(
                f"torch_nhwc: {name!r} of a state dict was written to, which has not reached the model: "
                "contiguous_checkpoints_ makes state dicts of copies. Write to the parameters, load the state dict, or "
                "take the hook off a model that is averaged by contiguous_checkpoints_(model).remove()",
                UserWarning,
                stacklevel=1,
            )


def add_hook(module: nn.Module, hook: Any) -> None:
    """Registers one of the hooks above, wherever it is not there already: an exception may have come in between."""
    expect_hookable(module)
    if hook not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(hook)
    if isinstance(hook, ConvertWhenMaterialised) and hook not in module._load_state_dict_post_hooks.values():
        module.register_load_state_dict_post_hook(hook)  # type: ignore[no-untyped-call, unused-ignore]


def find_hook(module: nn.Module, hook_type: type) -> Any:
    """The hook of a type on a module, or `None`."""
    return next((hook for hook in module._forward_pre_hooks.values() if type(hook) is hook_type), None)


def state_dict_hook_key(module: nn.Module) -> int | None:
    """The key of the hook that makes a module's state dicts contiguous, among its state-dict hooks."""
    return next((key for key, hook in module._state_dict_hooks.items() if type(hook) is ContiguousStateDict), None)


def remove_hook(module: nn.Module, hook: Any) -> None:
    """Takes a hook away, if it is still there."""
    for hooks in (module._forward_pre_hooks, module._load_state_dict_post_hooks):
        for key in [key for key, each in hooks.items() if each is hook]:
            hooks.pop(key, None)
            module._forward_pre_hooks_with_kwargs.pop(key, None)
