"""State dicts of contiguous tensors, and state dicts in which the weights of a plan are in format."""

import copy
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from torch_nhwc.formats import Format
from torch_nhwc.memory import place_of
from torch_nhwc.ops import convert_weights_
from torch_nhwc.planning.plans import Plan, expect_plan
from torch_nhwc.planning.rows import Action


def contiguous_state_dict(model_or_state_dict: nn.Module | Mapping[str, Any]) -> dict[str, Any]:
    """Makes a state dict of contiguous tensors, for tools that take no others: safetensors, distributed checkpoints.

    Args:
        model_or_state_dict: a model, which is not changed, or a state dict, that of an optimizer as well.

    Returns:
        A copy of the state dict, nested ones included. Tensors that are contiguous already are the same ones; the
        others are contiguous copies. Exact aliases stay aliases.

    Example:
        >>> layer = torch.nn.Conv2d(3, 8, 3)
        >>> _ = torch_nhwc.convert_(layer)
        >>> torch_nhwc.contiguous_state_dict(layer)["weight"].is_contiguous()
        True
    """
    state = model_or_state_dict.state_dict() if isinstance(model_or_state_dict, nn.Module) else model_or_state_dict
    copies: dict[tuple[Any, ...], Tensor] = {}

    def contiguous(tensor: Tensor) -> Tensor:
        if tensor.layout != torch.strided or tensor.is_contiguous():
            return tensor
        place = tensor.device, place_of(tensor), tensor.shape, tensor.stride(), tensor.dtype
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
    """Makes a state dict whose weights are in the format of a plan, for `load_state_dict(assign=True)`.

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
    convert_weights_(list(weights.values()), Format(plan.memory_format).for_operators, storage="detach")
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
