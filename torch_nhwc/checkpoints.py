"""Checkpoints and the format: contiguous state dicts, restoring it, and checking that it is there."""

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_nhwc.companions import find_companions, followers_of
from torch_nhwc.ops import Storage, convert_weights_, lay_out_weights_
from torch_nhwc.planning import Action, Plan, Strides, match, operator_format
from torch_nhwc.report import CompanionRow, Report, expect_plan


def contiguous_state_dict(model_or_state_dict: nn.Module | Mapping[str, Any]) -> dict[str, Any]:
    """A state dict whose tensors are contiguous, for tools that take no others: safetensors, distributed checkpoints.

    Args:
        model_or_state_dict: a model, which is not changed, or a state dict, that of an optimizer as well.

    Returns:
        A copy of the state dict, nested ones included. Tensors that are contiguous already are the same ones; the
        others are contiguous copies. Exact aliases stay aliases.
    """
    state = model_or_state_dict.state_dict() if isinstance(model_or_state_dict, nn.Module) else model_or_state_dict
    copies: dict[tuple[Any, ...], Tensor] = {}

    def contiguous(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or tensor.is_contiguous():
            return tensor
        has_memory = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta
        address = tensor.data_ptr() if has_memory else id(tensor)
        place = tensor.device, address, tensor.shape, tensor.stride(), tensor.dtype
        if place not in copies:
            copies[place] = tensor.detach().clone(memory_format=torch.contiguous_format)
        return copies[place]

    return _map_tensors(state, contiguous)  # type: ignore[no-any-return]


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
    """A state dict in which the weights of a plan's sites are in format, for `load_state_dict(assign=True)`.

    Reading a checkpoint that is mapped into memory, as safetensors and `torch.load(mmap=True)` do, and converting it
    is then one pass over the bytes.

    Args:
        state_dict: of a model that the plan fits; it is not changed.
        plan: made of the model on the meta device, for example.

    Returns:
        A copy of the state dict. Weights whose bytes have to move are in new memory, as are those that change and are
        slices of a larger storage; everything else stays in the memory that it is in. Exact aliases stay aliases.

    Raises:
        TypeError: `state_dict` is not a mapping, or `plan` not a plan.
        ValueError: an entry has another shape than the plan's site, or there is no entry for any site.
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
    convert_weights_(list(weights.values()), operator_format(plan.memory_format), storage="detach")
    converted = _copy(state_dict)
    converted.update(weights)
    return converted  # type: ignore[no-any-return]


def _nothing_found(expected: str, state_dict: Mapping[str, Any]) -> str:
    """The sentence on a state dict without any weight of the plan, with the prefix that would explain it."""
    message = f"the state dict holds none of the plan's weights: expected {expected!r}"
    for key in state_dict:
        if str(key).endswith(f".{expected}"):
            return f"{message}, got {key!r}: take the prefix {key.removesuffix(expected)!r} off its names"
        if expected.endswith(f".{key}"):
            return f"{message}, got {key!r}: put the prefix {expected.removesuffix(key)!r} before its names"
    return message


def restore_(
    model: nn.Module, plan: Plan, optimizer: Any = None, ema: Any = None, storage: Storage = "detach"
) -> Report:
    """Brings back the format that a plan describes, where something took it away.

    `load_state_dict(assign=True)`, `vector_to_parameters` and `.to()` do; gradients, state and averaged copies that
    are given follow. Weights may have another dtype than in the plan. What else was laid out anew, such as a transposed
    weight of a linear layer, is not the plan's: `align_` makes the optimizer's state fit.

    Args:
        model: one that the plan fits.
        plan: of the conversion, `report.plan`.
        optimizer: as in `convert_`.
        ema: as in `convert_`.
        storage: as in `convert_`; `"detach"`, because `vector_to_parameters` leaves slices of one vector.

    Raises:
        TypeError: `plan` is not a plan.
        ValueError: the model differs from the plan.
    """
    from torch_nhwc.conversion import convert_

    expect_plan(plan)
    rows = [
        row._replace(dtype=str(site.tensor.dtype)) if site.tensor is not None else row
        for row, site in zip(plan.rows, match(plan, model, any_dtype=True))
    ]
    return convert_(model, plan=Plan(tuple(rows), plan.memory_format), optimizer=optimizer, ema=ema, storage=storage)


def align_(model: nn.Module, optimizer: Any) -> list[CompanionRow]:
    """Lays gradients and optimizer state out as their parameters lie.

    To be called after `optimizer.load_state_dict` of a checkpoint that may be in another layout: fused CPU optimizers
    step silently wrong, and others slowly, where a parameter and its state differ. Every parameter is looked at, not
    only convolution weights.

    Args:
        model: what the optimizer optimizes.
        optimizer: one, or several.

    Returns:
        What was laid out anew; empty where all was in order.

    Raises:
        ValueError: the optimizer holds none of the model's parameters.
        RuntimeError: state that cannot change; nothing has changed then.
    """
    followers = followers_of(optimizer, None)
    parameters = [(index, name, tensor) for index, (name, tensor) in enumerate(model.named_parameters())]
    ours = {id(tensor) for _, _, tensor in parameters}
    for each in followers.optimizers:
        if not any(id(tensor) in ours for group in each.param_groups for tensor in group["params"]):
            raise ValueError(f"align_: the {type(each).__name__} holds none of the model's parameters")
    strided = [each for each in parameters if type(each[2]) is nn.Parameter and each[2].layout == torch.strided]
    apart = [
        companion
        for companion in find_companions(strided, followers)
        if companion.reason is None
        and not lies_as(companion.tensor, parameters[companion.row][2].stride())
        and 0 not in parameters[companion.row][2].stride()
    ]
    strides = [parameters[companion.row][2].stride() for companion in apart]
    outcomes = lay_out_weights_([companion.tensor for companion in apart], strides, storage="detach")
    return [
        CompanionRow(parameters[companion.row][1], companion.label, outcome, None)
        for companion, outcome in zip(apart, outcomes)
    ]


def lies_as(tensor: Tensor, strides: Strides) -> bool:
    """Whether every element lies where these strides put it, whatever they are in dimensions of size 1."""
    if tensor.layout != torch.strided:  # a sparse gradient has no layout to share
        return True
    return all(size <= 1 or own == other for size, own, other in zip(tensor.shape, tensor.stride(), strides))
