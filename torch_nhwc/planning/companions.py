"""Companions: the gradients, optimizer state and averaged copies that share the layout of a weight, and follow it."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from torch_nhwc.formats import Strides
from torch_nhwc.memory import lies_as
from torch_nhwc.modules.optimizers import state_of
from torch_nhwc.outcomes import Outcome
from torch_nhwc.planning.averaging import Copy, averaged_copy, copy_inside, tensor_of
from torch_nhwc.reasons import Reason

# Types whose bytes are what they seem.
_PLAIN = (Tensor, nn.Parameter)
# Numbers of one byte, which optimizers use as codes.
_CODES = {torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2}


@dataclass(slots=True)
class Weight:
    """A weight whose companions are looked for."""

    name: str
    """The full one, as in the state dict."""
    tensor: Tensor
    strides: Strides
    """Those that it has or is to have, and its companions with it."""


@dataclass(slots=True)
class Companion:
    """A tensor that goes with a weight."""

    weight: Weight
    label: str
    """`grad`, `ema`, `ema.grad`, or the name that the optimizer gives to its state."""
    tensor: Tensor
    reason: Reason | None = None
    """Why it stays as it is, `None` where it follows."""
    outcome: Outcome = Outcome.KEPT
    """What the operators are to do to it, and then what they did."""

    @property
    def changes(self) -> bool:
        """Whether the operators are to be called."""
        return self.reason is None and self.outcome is not Outcome.KEPT


class CompanionRow(NamedTuple):
    """A row says what was done to a gradient, a state of an optimizer or an averaged copy.

    Example:
        >>> model = torch.nn.Conv2d(3, 8, 3)
        >>> model.weight.grad = torch.zeros(8, 3, 3, 3)
        >>> torch_nhwc.convert_(model).companions
        [CompanionRow(site='weight', label='grad', outcome=<Outcome.REUSED: 2>, reason=None)]
    """

    site: str
    """The full name of its weight."""
    label: str
    """`grad`, `ema`, `ema.grad`, or the name that the optimizer gives to its state."""
    outcome: Outcome | None
    """`None` where it stays as it is, and after a dry run."""
    reason: Reason | None
    """Why it stays as it is."""


class Sources(NamedTuple):
    """Where companions come from."""

    optimizers: tuple[Any, ...] = ()
    copies: tuple[Copy, ...] = ()
    """Averaged copies: models like the model, or tensors by the full names of its sites."""
    is_optimizer_unknown: bool = False
    """Whether nobody has said if there is one."""

    def check_optimizers(self, model: nn.Module, weights: Iterable[Tensor | None] = ()) -> None:
        """Raises a ValueError for an optimizer that holds none of a model's parameters: nothing of it would follow.

        Args:
            model: whose parameters they should be.
            weights: those of its sites, which need not be registered parameters.
        """
        if not self.optimizers:
            return
        of_model = {id(tensor) for tensors in (weights, model.parameters()) for tensor in tensors}
        for each in self.optimizers:
            if held_by(each).isdisjoint(of_model):
                raise ValueError(
                    f"the {type(each).__name__} holds none of the model's parameters: its state would not follow"
                )

    def joined(self, others: "Sources") -> "Sources":
        """These and others."""
        return Sources(self.optimizers + others.optimizers, self.copies + others.copies)

    def layers_at(self, path: str) -> list[nn.Module]:
        """The layers of the averaged copies at a path."""
        return [copy.get_submodule(path) for copy in self.copies if isinstance(copy, nn.Module)]

    def weakly(self) -> "Callable[[], Sources]":
        """A function that gives those again that still exist."""
        optimizers = [_reference(optimizer) for optimizer in self.optimizers]
        copies = [
            weakref.ref(copy)
            if isinstance(copy, nn.Module)
            else partial(_alive, {name: TensorWeakRef(tensor) for name, tensor in copy.items()})
            for copy in self.copies
        ]
        return lambda: Sources(
            tuple(each for reference in optimizers if (each := reference()) is not None),
            tuple(each for reference in copies if (each := reference()) is not None),
        )


def held_by(optimizer: Any) -> set[int]:
    """The identities of an optimizer's parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _reference(optimizer: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(optimizer)
    except TypeError:  # a wrapper with slots
        return lambda: optimizer


def _alive(references: Mapping[str, TensorWeakRef]) -> dict[str, Tensor] | None:
    tensors = {name: tensor for name, reference in references.items() if (tensor := reference()) is not None}
    return tensors or None


def sources_of(optimizer: Any, ema: Any, model: nn.Module) -> Sources:
    """One or several optimizers and averaged copies of a model.

    Raises:
        TypeError: something is neither an optimizer, nor what `averaged_copy` takes.
        ValueError: as `averaged_copy` raises it.
    """
    optimizers = _as_tuple(optimizer)
    for each in optimizers:
        if not (hasattr(each, "state") and hasattr(each, "param_groups")):
            raise TypeError(f"expected an optimizer, or a list of them, got {type(each).__name__}")
    return Sources(optimizers, tuple(averaged_copy(each, model) for each in _as_tuple(ema)), optimizer is None)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Sequence) else (value,)


def find_companions(weights: Sequence[Weight], sources: Sources) -> list[Companion]:
    """The companions of some weights.

    Optimizer state belongs to a weight by the identity of the parameter, and follows it where it has its shape.

    Raises:
        ValueError: an averaged copy has a weight in another shape, or lacks it; a mapping may lack some, but not all.
    """
    found = [Companion(weight, "grad", gradient) for weight in weights if (gradient := weight.tensor.grad) is not None]
    by_identity = {id(weight.tensor): weight for weight in weights} if len(sources.optimizers) > 1 else {}
    for optimizer in sources.optimizers:
        states = state_of(optimizer)
        # One of many optimizers may have a single parameter: not all weights are looked for in each.
        is_small = by_identity and len(states) < len(weights)
        for weight in filter(None, (by_identity.get(id(each)) for each in states)) if is_small else weights:
            state = states.get(weight.tensor)
            if state is None:
                continue
            shape, dtype = weight.tensor.shape, weight.tensor.dtype
            for key, value in (state if isinstance(state, dict) else {"state": state}).items():
                if type(value) is Tensor:
                    if value.dim() == 0:  # a count of steps
                        continue
                    if value.dtype is dtype and value.shape == shape and _reason_to_stay(value) is None:
                        found.append(Companion(weight, key, value))
                        continue
                found += [Companion(weight, *each) for each in _matching({key: value}, shape)]
    for copy in sources.copies:
        tensors = [tensor_of(copy, weight.name) for weight in weights]
        is_partial = isinstance(copy, Mapping) and any(tensor is not None for tensor in tensors)
        for weight, tensor in zip(weights, tensors):
            if tensor is None and is_partial:  # buffers and frozen weights are rarely averaged
                continue
            shape = weight.tensor.shape
            if tensor is None or tensor.shape != shape:
                got = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
                hint = copy_inside(copy, weight.name)
                raise ValueError(f"the averaged copy has {got} at {weight.name!r}, the model has {tuple(shape)}{hint}")
            found.append(Companion(weight, "ema", tensor))
            if tensor.grad is not None:
                found.append(Companion(weight, "ema.grad", tensor.grad))
    return found


def find_apart(weights: Sequence[Weight], sources: Sources) -> list[Companion]:
    """The companions that are to lie as their weights, and do not."""
    companions = find_companions(weights, sources)
    return [each for each in companions if each.reason is None and not lies_as(each.tensor, each.weight.strides)]


def is_plain(parameter: Tensor) -> bool:
    """Whether what follows a parameter can lie as it does."""
    return type(parameter) is nn.Parameter and parameter.layout == torch.strided and 0 not in parameter.stride()


def _matching(state: Any, shape: torch.Size, prefix: str = "") -> Iterator[tuple[str, Tensor, Reason | None]]:
    """The tensors in a weight's state, at any depth, and why some stay as they are."""
    items: Iterable[tuple[object, Any]] = state.items() if isinstance(state, Mapping) else enumerate(state)
    for key, value in items:
        if isinstance(value, Tensor):
            if value.shape == shape:
                yield f"{prefix}{key}", value, _reason_to_stay(value)
            elif value.dim() > 0 and value.numel() > 1:  # a count of steps is nothing to speak of
                yield f"{prefix}{key}", value, Reason.OTHER_SHAPE
        elif isinstance(value, (Mapping, list, tuple)):
            yield from _matching(value, shape, f"{prefix}{key}.")


def _reason_to_stay(state: Tensor) -> Reason | None:
    if type(state) not in _PLAIN or state.layout is not torch.strided:
        return Reason.OTHER_KIND
    # Bytes are codes with a scale for each block of memory: they cannot be permuted, and kernels that read them beside
    # the weight go by memory, too.
    return Reason.STATE_IN_THE_WAY if state.dtype in _CODES else None
