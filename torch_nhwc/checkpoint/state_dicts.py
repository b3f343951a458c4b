"""State dicts of contiguous tensors, and state dicts whose weights are in the format of a plan."""

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torch_nhwc.converting.step_guard import watch_for_good
from torch_nhwc.layout import Format, contiguous_copies
from torch_nhwc.nn.hooks import ContiguousStateDict, state_dict_hook_key
from torch_nhwc.ops import set_strides_
from torch_nhwc.planning.plans import Action, PlanOrPath, plan_from
from torch_nhwc.running.containers import map_tensors


def contiguous_state_dict(model_or_state_dict: nn.Module | Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of contiguous tensors, for tools that accept no others: safetensors, distributed checkpoints.

    Args:
        model_or_state_dict: A model, which is not changed, or a state dict, which may be an optimizer's.

    Returns:
        A copy of the state dict, with all containers of tensors in it: mappings, lists, tuples, dataclasses. Tensors
        that are contiguous are the same objects; the others are contiguous copies. Exact aliases stay aliases.

    Raises:
        TypeError: It is neither; an optimizer, for example.

    Example:
        >>> layer = torch.nn.Conv2d(3, 8, 3)
        >>> _ = torch_nhwc.convert_(layer)
        >>> torch_nhwc.checkpoint.contiguous_state_dict(layer)["weight"].is_contiguous()
        True
    """
    if not isinstance(model_or_state_dict, (nn.Module, Mapping)):
        hint = ": pass its state_dict()" if hasattr(model_or_state_dict, "state_dict") else ""
        raise TypeError(f"expected a model or a state dict, got {type(model_or_state_dict).__name__}{hint}")
    state = model_or_state_dict.state_dict() if isinstance(model_or_state_dict, nn.Module) else model_or_state_dict
    contiguous = _copy(state)
    contiguous.update(map_tensors(dict(state), contiguous_copies()))
    return contiguous  # type: ignore[no-any-return]


def contiguous_checkpoints_(model_or_optimizer: nn.Module | Optimizer) -> RemovableHandle:
    """Make the state dicts of a model or an optimizer contiguous from this call on, by a state-dict hook.

    Checkpoints that trainers, engines and wrappers save then hold contiguous tensors. Where PyTorch broadcasts a
    checkpoint on loading (`broadcast_from_rank0`), channels-last tensors would arrive permuted. The model keeps its
    format, and loads such checkpoints in it. The hook works for whatever holds the model, such as DDP, and for copies
    of the model; a part of the model that is saved by itself needs a hook of its own.

    Tensors that are not contiguous become copies, except with `keep_vars=True`. Writing to such a copy does not change
    the model, and gives a warning unless the state dict is loaded afterwards: remove the hook from averaged models that
    are updated through their state dict. PyTorch does not count writes through `.data` or NumPy (`.numpy()`), which are
    lost without a warning.

    Args:
        model_or_optimizer: Any module, or an optimizer, whose copies do not have the hook.

    Returns:
        A handle whose `remove()` removes the hook. A second call returns a handle of the hook that exists.

    Raises:
        TypeError: It is neither.
        RuntimeError: It is a TorchScript module, which takes no hooks.

    Warns:
        UserWarning: Later, when a state dict is freed that was written to in vain.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3))
        >>> _ = torch_nhwc.convert_(model)
        >>> handle = torch_nhwc.checkpoint.contiguous_checkpoints_(model)
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


def convert_state_dict(state_dict: Mapping[str, Any], plan: PlanOrPath) -> dict[str, Any]:
    """Return a state dict whose weights are in the format of a plan, for `load_state_dict(assign=True)`.

    Reading a checkpoint that is mapped into memory, as safetensors and `torch.load(mmap=True)` do, and converting it
    takes one pass over the bytes. The step guard stays installed afterwards.

    Args:
        state_dict: The state dict of a model that the plan fits; it is not changed.
        plan: A plan of the model, which may be on the meta device; or the path of its file.

    Returns:
        A copy of the state dict. Weights whose bytes have to move are in new memory, as are those that change and are
        slices of a larger storage; everything else shares the memory of the original. Exact aliases stay aliases.

    Raises:
        TypeError: `state_dict` is not a mapping, or `plan` is not a plan.
        ValueError: An entry has another shape than the plan's row, or there is no entry for any row.

    Example:
        >>> layer = torch.nn.Conv2d(3, 8, 3)
        >>> state = torch_nhwc.checkpoint.convert_state_dict(layer.state_dict(), torch_nhwc.plan(layer))
        >>> state["weight"].stride()
        (27, 1, 9, 3)
    """
    plan = plan_from(plan)
    if not isinstance(state_dict, Mapping):
        hint = ": pass model.state_dict()" if isinstance(state_dict, nn.Module) else ""
        raise TypeError(f"expected a state dict, names and tensors, got {type(state_dict).__name__}{hint}")
    wanted = [row for row in plan.rows if row.is_wanted and row.action is not Action.REFUSE]
    if wanted and not any(row.full_name in state_dict for row in wanted):
        raise ValueError(_nothing_found(wanted[0].full_name, state_dict))
    weights, strides = {}, []
    for row in wanted:
        value = state_dict.get(row.full_name)
        if not isinstance(value, Tensor):
            continue
        if row.shape not in (None, tuple(value.shape)):
            raise ValueError(
                f"the state dict differs from the plan: {row.full_name!r} is {tuple(value.shape)}, "
                f"the plan has {row.shape}"
            )
        # The state dict keeps the storage that the detached tensor shares, so that it is not permuted in place.
        weights[row.full_name] = value.detach()
        lazy = Format(plan.memory_format).of_filters(value.shape[1], row.groups)
        strides.append(row.target_strides or lazy.strides(value.shape))
    set_strides_(list(weights.values()), strides, storage="detach")
    if weights and Format(plan.memory_format).is_channels_last:
        watch_for_good()
    converted = _copy(state_dict)
    converted.update(weights)
    return converted  # type: ignore[no-any-return]


def _contiguous_state(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return contiguous_state_dict(state_dict)


def _copy(mapping: Mapping[str, Any]) -> Any:
    """Return a copy, of the same type if that is mutable, with the metadata that load_state_dict reads."""
    return copy.copy(mapping) if isinstance(mapping, MutableMapping) else dict(mapping)


def _nothing_found(expected: str, state_dict: Mapping[str, Any]) -> str:
    """Return the error for a state dict without any weight of the plan, with the prefix that would explain it."""
    message = f"the state dict holds none of the plan's weights: expected {expected!r}"
    for key in state_dict:
        if str(key).endswith(f".{expected}"):
            return f"{message}, got {key!r}: remove the prefix {key.removesuffix(expected)!r} from its names"
        if expected.endswith(f".{key}"):
            return f"{message}, got {key!r}: add the prefix {expected.removesuffix(key)!r} to its names"
    return message
