"""State dicts of contiguous tensors, and state dicts in which the weights of a plan are in format."""

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torch_nhwc.formats import Format, Strides
from torch_nhwc.hooks import ContiguousStateDict, state_dict_hook_key
from torch_nhwc.memory import contiguous_copies
from torch_nhwc.ops import lay_out_weights_
from torch_nhwc.planning.plans import Plan, expect_plan
from torch_nhwc.planning.rows import Action, PlanRow
from torch_nhwc.stepping.guard import watch_for_good


def contiguous_state_dict(model_or_state_dict: nn.Module | Mapping[str, Any]) -> dict[str, Any]:
    """Makes a state dict of contiguous tensors, for tools that take no others: safetensors, distributed checkpoints.

    Args:
        model_or_state_dict: a model, which is not changed, or a state dict, that of an optimizer as well.

    Returns:
        A copy of the state dict, nested ones included. Tensors that are contiguous already are the same ones; the
        others are contiguous copies. Exact aliases stay aliases.

    Raises:
        TypeError: it is neither, an optimizer for one.

    Example:
        >>> layer = torch.nn.Conv2d(3, 8, 3)
        >>> _ = torch_nhwc.convert_(layer)
        >>> torch_nhwc.contiguous_state_dict(layer)["weight"].is_contiguous()
        True
    """
    if not isinstance(model_or_state_dict, (nn.Module, Mapping)):
        hint = ": pass its state_dict()" if hasattr(model_or_state_dict, "state_dict") else ""
        raise TypeError(f"expected a model or a state dict, got {type(model_or_state_dict).__name__}{hint}")
    state = model_or_state_dict.state_dict() if isinstance(model_or_state_dict, nn.Module) else model_or_state_dict
    return _map_tensors(state, contiguous_copies())  # type: ignore[no-any-return]


def contiguous_checkpoints_(model_or_optimizer: nn.Module | Optimizer) -> RemovableHandle:
    """Makes the state dicts of a model, or an optimizer, contiguous from here on, whoever asks, by a state-dict hook.

    A checkpoint that trainers, engines and wrappers save is then one of contiguous tensors. Where PyTorch broadcasts a
    checkpoint on loading (`broadcast_from_rank0`), channels-last tensors arrive permuted. The model stays as it is, and
    loads such checkpoints in its own format. State dicts of what holds the model, such as DDP, are contiguous there as
    well; a part of the model that is saved by itself needs a hook of its own, and copies of the model have one.

    Tensors that are not contiguous become copies, as `contiguous_state_dict` makes them, except with `keep_vars=True`.
    What is written to such a copy does not reach the model, and is a warning unless the state dict is then loaded: from
    averaged models that are updated through their state dict, the hook has to be taken away. What is written through
    `.data` or by NumPy (`.numpy()`) PyTorch does not count, and it is lost without a warning.

    Args:
        model_or_optimizer: any module, or an optimizer, whose copies do not have the hook.

    Returns:
        The handle whose `remove()` takes the hook away. A second call gives the handle of the hook that is there.

    Raises:
        TypeError: it is neither.
        RuntimeError: it is a TorchScript module, which takes no hook.

    Warns:
        UserWarning: later, when a state dict ends to which something was written in vain.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3))
        >>> _ = torch_nhwc.convert_(model)
        >>> handle = torch_nhwc.contiguous_checkpoints_(model)
        >>> model.state_dict()["0.weight"].is_contiguous(), model[0].weight.is_contiguous()
        (True, False)
        >>> handle.remove()
    """
    owner, loading = model_or_optimizer, None
    hooks: Any
    if isinstance(owner, Optimizer):
        hooks = owner._optimizer_state_dict_post_hooks
        key = next((key for key, hook in hooks.items() if hook is _contiguous_state), None)
        key = owner.register_state_dict_post_hook(_contiguous_state).id if key is None else key
    elif isinstance(owner, torch.jit.ScriptModule):
        raise RuntimeError("contiguous_checkpoints_: a TorchScript module takes no hook: use contiguous_state_dict")
    elif isinstance(owner, nn.Module):
        hooks, loading = owner._state_dict_hooks, owner._load_state_dict_pre_hooks
        key = state_dict_hook_key(owner)
        if key is None:
            hook = ContiguousStateDict()
            key = owner.register_state_dict_post_hook(hook).id  # type: ignore[no-untyped-call, unused-ignore]
            loading[key] = hook.loaded
    else:
        raise TypeError(f"contiguous_checkpoints_: expected a model or an optimizer, got {type(owner).__name__}")
    handle = RemovableHandle(hooks, extra_dict=loading)
    handle.id = key
    return handle


def _contiguous_state(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return contiguous_state_dict(state_dict)


def _map_tensors(value: Any, function: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        mapped = _copy(value)
        for key, each in value.items():
            mapped[key] = _map_tensors(each, function)
        return mapped
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(each, function) for each in value)
    return value


def _copy(mapping: Mapping[str, Any]) -> Any:
    """Of the same type where that can be written to, with the metadata that load_state_dict looks for."""
    return copy.copy(mapping) if isinstance(mapping, MutableMapping) else dict(mapping)


def convert_state_dict(state_dict: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Makes a state dict whose weights are in the format of a plan, for `load_state_dict(assign=True)`.

    Reading a checkpoint that is mapped into memory, as safetensors and `torch.load(mmap=True)` do, and converting it
    is then one pass over the bytes. The guard of `set_step_guard` is there from then on.

    Args:
        state_dict: of a model that the plan fits; it is not changed.
        plan: made of the model on the meta device, for example.

    Returns:
        A copy of the state dict. Weights whose bytes have to move are in new memory, as are those that change and are
        slices of a larger storage; everything else stays in the memory that it is in. Exact aliases stay aliases.

    Raises:
        TypeError: `state_dict` is not a mapping, or `plan` not a plan.
        ValueError: an entry has another shape than the plan's row, or there is no entry for any row.

    Example:
        >>> layer = torch.nn.Conv2d(3, 8, 3)
        >>> torch_nhwc.convert_state_dict(layer.state_dict(), torch_nhwc.plan(layer))["weight"].stride()
        (27, 1, 9, 3)
    """
    expect_plan(plan)
    if not isinstance(state_dict, Mapping):
        hint = ": pass model.state_dict()" if isinstance(state_dict, nn.Module) else ""
        raise TypeError(f"expected a state dict, names and tensors, got {type(state_dict).__name__}{hint}")
    wanted = [row for row in plan.rows if row.is_wanted and row.action is not Action.REFUSE]
    if wanted and not any(row.full_name in state_dict for row in wanted):
        raise ValueError(_nothing_found(wanted[0].full_name, state_dict))
    rows = [row for row in wanted if isinstance(state_dict.get(row.full_name), Tensor)]
    # The state dict holds the storages that these share, so that none is permuted in place.
    weights = {row.full_name: state_dict[row.full_name].detach() for row in rows}
    for row in rows:
        shape = tuple(weights[row.full_name].shape)
        if row.shape not in (None, shape):
            raise ValueError(
                f"the state dict differs from the plan: {row.full_name!r} is {shape}, the plan has {row.shape}"
            )
    strides = [_wanted(row, weight, Format(plan.memory_format)) for row, weight in zip(rows, weights.values())]
    lay_out_weights_(list(weights.values()), strides, storage="detach")
    if rows and Format(plan.memory_format).is_channels_last:
        watch_for_good()
    converted = _copy(state_dict)
    converted.update(weights)
    return converted  # type: ignore[no-any-return]


def _wanted(row: PlanRow, weight: Tensor, of_plan: Format) -> Strides:
    """Of a weight, those of the format, whatever older versions of this package have planned for one channel."""
    if row.target_strides is not None and row.name != "weight":  # what a weight is computed from may have other shapes
        return row.target_strides
    return of_plan.of_filters(weight.shape[1], row.groups).strides(weight.shape)


def _nothing_found(expected: str, state_dict: Mapping[str, Any]) -> str:
    """The sentence on a state dict without any weight of the plan, with the prefix that would explain it."""
    message = f"the state dict holds none of the plan's weights: expected {expected!r}"
    for key in state_dict:
        if str(key).endswith(f".{expected}"):
            return f"{message}, got {key!r}: take the prefix {key.removesuffix(expected)!r} off its names"
        if expected.endswith(f".{key}"):
            return f"{message}, got {key!r}: put the prefix {expected.removesuffix(key)!r} before its names"
    return message
