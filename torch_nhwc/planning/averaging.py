"""What keeps an averaged copy of a model: the copy itself, or one of the wrappers that people have."""

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from torch_nhwc.formats import CHANNELS_LAST
from torch_nhwc.memory import place_of
from torch_nhwc.ops import plan_weights
from torch_nhwc.outcomes import Outcome

Copy = nn.Module | Mapping[str, Tensor]

# Where wrappers keep the averaged model, or a list of its parameters: by the name of their class or a base of it.
HOLDERS = {
    "AveragedModel": "module",  # torch
    "EMA": "ema_model",  # ema_pytorch
    "EMAModel": "shadow_params",  # diffusers
    "ModelEMA": "ema",  # ultralytics
    "ModelEma": "ema",  # timm
    "ModelEmaV2": "module",
    "ModelEmaV3": "module",
}


def averaged_copy(given: Any, model: nn.Module) -> Copy:
    """The averaged copy that somebody has given, out of its wrapper.

    Raises:
        TypeError: it is neither a module nor a mapping of names to tensors, nor a known wrapper.
        ValueError: it is the model itself; a list of parameters is not as long as the model's; the tensors of a mapping
            share memory with others that would not follow, as those of a state dict do.
    """
    if given is model:
        raise ValueError("expected ema to be an averaged copy of the model, got the model itself")
    for base in type(given).__mro__:
        held = getattr(given, HOLDERS.get(base.__name__, ""), None)
        if isinstance(held, nn.Module):
            return held
        if isinstance(held, Sequence):
            return _named(held, model, type(given).__name__)
    if isinstance(given, nn.Module):
        return given
    if isinstance(given, Mapping):
        _expect_kept(given)
        return given
    raise TypeError(
        f"expected ema to be a module, or names and tensors, got {type(given).__name__}{_hint(given, model)}: for a "
        "list of averaged parameters, give dict(zip(names, parameters))"
    )


def tensor_of(copy: Copy, name: str) -> Tensor | None:
    """The tensor that an averaged copy has by a full name."""
    if isinstance(copy, Mapping):
        return copy.get(name)
    try:
        return attrgetter(name)(copy)  # type: ignore[no-any-return]
    except AttributeError:
        return None


def copy_inside(copy: Any, name: str) -> str:
    """Where a module that lacks a tensor has a child that does not, as a hint for its error."""
    children = copy.named_children() if isinstance(copy, nn.Module) else ()
    found = [child for child, module in children if tensor_of(module, name) is not None]
    return f": give its .{found[0]}" if found else ""


def _named(parameters: Sequence[Tensor], model: nn.Module, holder: str) -> dict[str, Tensor]:
    names = [name for name, _ in model.named_parameters()]
    if len(names) != len(parameters):
        raise ValueError(
            f"the {holder} keeps {len(parameters)} averaged parameters, the model has {len(names)}: give "
            "dict(zip(names, parameters)) with the names of those that it keeps"
        )
    return dict(zip(names, parameters))


def _expect_kept(copies: Mapping[str, Tensor]) -> None:
    """Raises a ValueError for tensors that are views of others: those would stay as they are, and these be dropped."""
    plain = {
        name: each
        for name, each in copies.items()
        if type(each) is Tensor and each.dim() in CHANNELS_LAST and each.layout is torch.strided
    }
    places = Counter(map(place_of, plain.values()))
    own = {name: each for name, each in plain.items() if places[place_of(each)] == 1}  # tied ones hold each other
    for memory_format in (None, torch.contiguous_format):  # whatever they are in, one of the two would move them
        for name, outcome in zip(own, plan_weights(list(own.values()), memory_format, storage="reuse")):
            # Where strides alone change, the operators do not look who holds the memory.
            if outcome is Outcome.HELD or (outcome is Outcome.RESTRIDED and _is_held(own[name])):
                raise ValueError(
                    f"the averaged copy {name!r} shares its memory with something else, which would not follow, as "
                    "what a module's state_dict() gives does: give the module, or dict(module.named_parameters())"
                )


def _is_held(tensor: Tensor) -> bool:
    """Whether more than this tensor holds its storage."""
    mine, fresh = tensor.untyped_storage(), torch.empty(1).untyped_storage()
    use_count = torch._C._storage_Use_Count
    return use_count(mine._cdata) > use_count(fresh._cdata) + 1  # the fresh one's tensor is gone


def _hint(given: Any, model: nn.Module) -> str:
    """Where an object keeps a module, or names and tensors, that are not the model itself."""
    found = [
        name
        for name, value in getattr(given, "__dict__", {}).items()
        if (isinstance(value, nn.Module) and value is not model) or (isinstance(value, Mapping) and _has_tensors(value))
    ]
    return f" (give its .{found[0]})" if found else ""


def _has_tensors(mapping: Mapping[Any, Any]) -> bool:
    return bool(mapping) and all(isinstance(each, Tensor) for each in mapping.values())
