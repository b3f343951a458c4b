"""Companions: the gradients, optimizer state and averaged copies that share the layout of a weight."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_nhwc.reasons import Reason
from torch_nhwc.sites import find_sites

# Types whose bytes are what they seem.
_PLAIN = (Tensor, nn.Parameter)


class Companion(NamedTuple):
    """A tensor that goes with the weight of a site."""

    row: int
    """The index of the site's row in the plan."""
    label: str
    """`grad`, `ema`, `ema.grad`, or the name that the optimizer gives to its state."""
    tensor: Tensor
    reason: Reason | None
    """Why it stays as it is, `None` where it follows."""


class Followers(NamedTuple):
    """Where companions come from."""

    optimizers: tuple[Any, ...] = ()
    copies: tuple[Mapping[str, Tensor], ...] = ()
    """Averaged copies, by the full names of the model's sites."""


def followers_of(optimizer: Any, ema: Any) -> Followers:
    """One or several optimizers and averaged copies.

    Raises:
        TypeError: something is neither an optimizer, nor a module or a mapping of names to tensors.
    """
    optimizers = _as_tuple(optimizer)
    for each in optimizers:
        if not (hasattr(each, "state") and hasattr(each, "param_groups")):
            raise TypeError(f"expected an optimizer, or a list of them, got {type(each).__name__}")
    return Followers(optimizers, tuple(_named_tensors(each) for each in _as_tuple(ema)))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Sequence) else (value,)


def _named_tensors(copy: Any) -> dict[str, Tensor]:
    if isinstance(copy, Mapping):
        return dict(copy)
    if not isinstance(copy, nn.Module):
        raise TypeError(f"expected ema to be a module, or names and tensors, got {type(copy).__name__}")
    model = copy.module if isinstance(copy, torch.optim.swa_utils.AveragedModel) else copy
    return {site.full_name: site.tensor for site in find_sites(model) if site.tensor is not None}


def find_companions(weights: Sequence[tuple[int, str, Tensor]], followers: Followers) -> list[Companion]:
    """The companions of some weights, each given by its site's index, its full name and itself.

    Optimizer state belongs to a weight by the identity of the parameter, and follows it where it has its shape.

    Raises:
        ValueError: an averaged copy lacks one of the names, or has it in another shape.
    """
    found = [
        Companion(index, "grad", gradient, None)
        for index, _, weight in weights
        if (gradient := weight.grad) is not None
    ]
    for optimizer in followers.optimizers:
        states = optimizer.state
        for index, _, weight in weights:
            if state := states.get(weight):
                shape = weight.shape
                for key, value in state.items():
                    if type(value) is Tensor and value.shape == shape and value.layout is torch.strided:
                        found.append(Companion(index, key, value, None))
                    else:
                        found += [Companion(index, *each) for each in _matching({key: value}, shape)]
    for copy in followers.copies:
        for index, name, weight in weights:
            tensor = copy.get(name)
            if tensor is None or tensor.shape != weight.shape:
                got = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
                raise ValueError(f"the averaged copy has {got} at {name!r}, the model has {tuple(weight.shape)}")
            found.append(Companion(index, "ema", tensor, None))
            if tensor.grad is not None:
                found.append(Companion(index, "ema.grad", tensor.grad, None))
    return found


def _matching(state: Any, shape: torch.Size, prefix: str = "") -> Iterator[tuple[str, Tensor, Reason | None]]:
    """The tensors in a weight's state, at any depth, and why some stay as they are."""
    items: Iterable[tuple[object, Any]] = state.items() if isinstance(state, Mapping) else enumerate(state)
    for key, value in items:
        if isinstance(value, Tensor):
            if value.shape == shape:
                is_plain = type(value) in _PLAIN and value.layout == torch.strided
                yield f"{prefix}{key}", value, None if is_plain else Reason.OTHER_KIND
            elif value.dim() > 0 and value.numel() > 1:  # a count of steps is nothing to speak of
                yield f"{prefix}{key}", value, Reason.OTHER_SHAPE
        elif isinstance(value, (Mapping, list, tuple)):
            yield from _matching(value, shape, f"{prefix}{key}.")
