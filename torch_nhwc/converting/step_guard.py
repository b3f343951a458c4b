"""The step guard: an optimizer pre-step hook, installed once a model that trains is converted.

Fused CPU optimizers give wrong updates, silently, when a parameter, its gradient and its state have different layouts,
for example after loading a checkpoint in the other layout: their kernels read all of them in memory order. Before such
a step, the guard gives state and gradients the strides of their parameter. It looks at all parameters that can be in a
channels-last format, since loading, copying and casting replace the parameters of a converted layer.
"""

import logging
import threading
import weakref
from collections.abc import Iterable, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from torch_nhwc.layout import CHANNELS_LAST
from torch_nhwc.ops import set_strides_
from torch_nhwc.planning.companions import find_mismatched
from torch_nhwc.rendering import warn
from torch_nhwc.sites.wrappers import with_inner

_logger = logging.getLogger("torch_nhwc")
_PLAIN = (Tensor, nn.Parameter)

_lock = threading.RLock()  # held where what follows changes: threads may convert at once
_is_enabled = True
_handles: list[RemovableHandle] = []
# Owners by their ids, each until it is deleted.
_watched: "dict[int, weakref.ref[object]]" = {}
# How often `watch` was called without `release`. Layers that are deleted still count, since copies of them may exist.
_count = 0
# For each optimizer: the kinds of warnings that it has had, and the gradients that copies replace during a step.
_warned: MutableMapping[Optimizer, set[str]] = WeakIdKeyDictionary()
_replaced: MutableMapping[Optimizer, list[tuple[Tensor, Tensor, Tensor]]] = WeakIdKeyDictionary()


def set_step_guard(enabled: bool) -> None:
    """Turn the step guard on or off for the whole process. It is on by default.

    Fused CPU optimizers give wrong updates, silently, when a parameter, its gradient and its state have different
    layouts. Once a model that trains is converted, the guard checks before each step of such an optimizer, gives state
    and gradients the strides of their parameter, and warns once for each optimizer. It is removed when every converted
    layer is reverted. It stays for the rest of the process once such an optimizer has stepped under it, whose state has
    the converted strides, or a converted layer was deleted, of which copies may exist. It never raises. It does not see
    gradients that a closure or the optimizer's own step hooks assign.

    Example:
        >>> torch_nhwc.training.set_step_guard(False)
        >>> torch_nhwc.training.set_step_guard(True)
    """
    global _is_enabled
    if not isinstance(enabled, bool):
        raise TypeError(f"set_step_guard: expected True or False, got {enabled!r}")
    with _lock:
        _is_enabled = enabled
        _install_or_remove()


def is_guarded() -> bool:
    """Return whether the guard is turned on."""
    return _is_enabled


def watch(owners: Iterable[nn.Module | Optimizer]) -> None:
    """Keep the guard installed until these are released; for good if one is deleted before that."""
    with _lock:
        new = [each for each in owners if id(each) not in _watched]
        _watched.update({id(each): weakref.ref(each, partial(_watched.pop, id(each))) for each in new})
        _keep_installed_for(len(new))


def is_watched(owner: nn.Module | Optimizer) -> bool:
    """Return whether the guard is installed for an owner."""
    return id(owner) in _watched


def release(owners: Iterable[nn.Module | Optimizer]) -> None:
    """End what `watch` began."""
    with _lock:
        _keep_installed_for(-sum(_watched.pop(id(each), None) is not None for each in owners))


def watch_for_good() -> None:
    """Keep the guard installed for the rest of the process: for converted weights whose layers are not known."""
    _keep_installed_for(1)


def align_when_loaded(optimizer: Optimizer) -> None:
    """Give an optimizer's state the strides of its parameters after each `load_state_dict`."""
    if not is_aligned_when_loaded(optimizer):
        optimizer.register_load_state_dict_post_hook(_align_state)


def leave_as_loaded(optimizer: Optimizer) -> None:
    """End what `align_when_loaded` began."""
    hooks = optimizer._optimizer_load_state_dict_post_hooks
    for key in [key for key, hook in hooks.items() if hook is _align_state]:
        hooks.pop(key, None)


def is_aligned_when_loaded(optimizer: Optimizer) -> bool:
    """Return whether an optimizer's state is aligned after each `load_state_dict`."""
    return _align_state in optimizer._optimizer_load_state_dict_post_hooks.values()


def loading_optimizer(optimizer: Any) -> Optimizer | None:
    """Return the optimizer that loads state: this one, or the one inside of a wrapper; `None` if none has hooks."""
    hooks = "_optimizer_load_state_dict_post_hooks"
    return next((each for each in with_inner(optimizer) if hooks in getattr(each, "__dict__", {})), None)


def _keep_installed_for(more: int) -> None:
    global _count
    with _lock:
        _count += more
        _install_or_remove()


def _install_or_remove() -> None:
    is_needed = _is_enabled and _count > 0
    if is_needed and not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))
        _handles.append(register_optimizer_step_post_hook(_restore_gradients))
    while _handles and not is_needed:
        _handles.pop().remove()


@_disable_dynamo
def _before_step(optimizer: Optimizer, *_: object) -> None:
    try:
        _restore_gradients(optimizer)  # the last step may have raised
        parameters = _parameters(optimizer.param_groups)
        if any(getattr(each, "grad_sample", None) is not None and not each.is_contiguous() for each in parameters):
            problem = (
                "its parameters are channels-last and have per-sample gradients (Opacus), which are computed from "
                "activations by their strides and are wrong: revert the conversion"
            )
            _warn_once(optimizer, "samples", problem)
        groups = [group for group in optimizer.param_groups if group.get("fused")]
        parameters = [each for each in _parameters(groups) if each.is_cpu]
        moved = _align(optimizer, parameters, has_gradients=True)
        if parameters:
            watch([optimizer])  # a revert does not know that its state has these strides now
        if moved:
            count = len({id(parameter) for parameter, _ in moved})
            problem = (
                f"{' and '.join(sorted({label for _, label in moved}))} had other strides than the parameters "
                f"({count} of them), with which a fused CPU optimizer gives wrong updates, and got the parameters' "
                "strides: give the optimizer to convert_ or revert, or call torch_nhwc.training.align_optimizer_ after "
                "its state is loaded"
            )
            _warn_once(optimizer, "moved", problem)
    except Exception as error:
        _warn_of_failure(optimizer, error)


@_disable_dynamo
def _restore_gradients(optimizer: Optimizer, *_: object) -> None:
    """Restore the gradients that copies have replaced, with the copies' values, which the step may have unscaled."""
    for parameter, gradient, copy in _replaced.pop(optimizer, []):
        if parameter.grad is copy:
            parameter.grad = gradient
            if 0 not in gradient.stride():
                gradient.detach().copy_(copy)


def _align_state(optimizer: Optimizer) -> None:
    """Give an optimizer's state the strides of its parameters, of any rank. Never raises.

    All state in a contiguous checkpoint is contiguous, also that of a linear layer's transposed weight.
    """
    try:
        parameters = (each for group in optimizer.param_groups for each in group["params"])
        _align(optimizer, [each for each in parameters if type(each) in _PLAIN and each.layout is torch.strided])
    except Exception as error:
        _warn_of_failure(optimizer, error)


def _parameters(groups: list[dict[str, Any]]) -> list[Tensor]:
    """Return the parameters of some groups that can be in a channels-last format."""
    parameters = (each for group in groups for each in group["params"])
    return [each for each in parameters if type(each) in _PLAIN and each.dim() in CHANNELS_LAST]


def _align(optimizer: Optimizer, parameters: list[Tensor], has_gradients: bool = False) -> list[tuple[Tensor, str]]:
    """Give state and gradients the strides of their parameters; return the parameter and label of each that changed."""
    moved = []
    for index, label, tensor in find_mismatched(parameters, [optimizer]):
        parameter = parameters[index]
        is_gradient = tensor is parameter.grad
        if is_gradient and not has_gradients:
            continue
        try:
            set_strides_([tensor], [parameter.stride()], storage="reuse" if is_gradient else "detach")
        except RuntimeError as error:
            if not is_gradient:
                _warn_of_failure(optimizer, error)
                continue
            # Others hold the gradient's memory, as DDP's buckets do: the step gets a copy.
            copy = torch.empty_strided(tensor.shape, parameter.stride(), dtype=tensor.dtype).copy_(tensor.detach())
            parameter.grad = copy
            _replaced.setdefault(optimizer, []).append((parameter, tensor, copy))
        moved.append((parameter, label))
    return moved


def _warn_of_failure(optimizer: Optimizer, error: Exception) -> None:
    problem = (
        f"its state or gradients cannot get the strides of its parameters: {str(error).splitlines()[0]}. A fused CPU "
        "optimizer may give wrong updates: use one that is not fused, or revert the conversion"
    )
    _warn_once(optimizer, "failed", problem)


def _warn_once(optimizer: Optimizer, kind: str, problem: str) -> None:
    """Warn once for each optimizer and kind. If warnings are errors, log it: a step never fails because of this."""
    kinds = _warned.setdefault(optimizer, set())
    if kind not in kinds:
        kinds.add(kind)
        message = f"torch_nhwc: {type(optimizer).__name__}: {problem}"
        try:
            warn(message)
        except Exception:
            _logger.warning(message)
