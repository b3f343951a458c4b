"""Companions: the gradients, optimizer state and averaged copies that share the layout of a weight, and follow it."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.weak import TensorWeakRef

from torch_nhwc.layout import CHANNELS_LAST, CONTIGUOUS, Format, Strides, memory_id
from torch_nhwc.ops import Outcome, mismatched_layouts, plan_weights
from torch_nhwc.sites import computed_weights
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.wrappers import flattens_parameters, keeps_buckets, state_of, with_inner

AveragedCopy = nn.Module | Mapping[str, Tensor]
# Types whose bytes are what they seem.
_PLAIN = (Tensor, nn.Parameter)
# Dtypes of one byte, which optimizers use as codes with a scale for each block of memory: they cannot be permuted.
CODES = frozenset(
    each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype) and each.itemsize == 1 and each is not torch.bool
)


@dataclass(slots=True)
class Weight:
    """A weight whose companions are looked for."""

    name: str
    """The weight's name in the state dict."""
    tensor: Tensor
    strides: Strides
    """The strides that the weight has or gets, and its companions with it."""
    format: Format = CONTIGUOUS
    """The format that these are the strides of."""
    strides_before: Strides | None = None
    """The weight's present strides, where they were looked up."""


@dataclass(slots=True)
class Companion:
    """A tensor that goes with a weight."""

    weight: Weight
    label: str
    """`grad`, `ema`, `ema.grad`, or the optimizer's name for its state."""
    tensor: Tensor
    reason: Reason | None = None
    """Why it stays as it is; `None` if it follows."""
    outcome: Outcome = Outcome.UNCHANGED
    """What the operators are to do to it, and then what they did."""

    @property
    def changes(self) -> bool:
        """Return whether the operators are called for it."""
        return self.reason is None and self.outcome is not Outcome.UNCHANGED


class Sources(NamedTuple):
    """Where companions come from: optimizers and averaged copies."""

    optimizers: tuple[Any, ...] = ()
    copies: tuple[AveragedCopy, ...] = ()
    is_optimizer_unknown: bool = False
    """True if the caller has not said whether there is an optimizer."""

    def check_optimizers(self, tensors: Iterable[Tensor | None]) -> None:
        """Raise a ValueError for an optimizer that holds none of a model's tensors, so that no state would follow."""
        if not self.optimizers:
            return
        of_model = set(map(id, tensors))
        for each in self.optimizers:
            if held_by(each).isdisjoint(of_model):
                raise ValueError(
                    f"the {type(each).__name__} holds none of the model's parameters: its state would not follow"
                )

    def needing_contiguous(self) -> Iterator[tuple[Reason, set[int]]]:
        """Yield the ids of the parameters of each optimizer that takes only contiguous ones, and why."""
        for optimizer in (each for given in self.optimizers for each in with_inner(given)):
            if flattens_parameters(optimizer):
                yield Reason.FLATTENING_OPTIMIZER, held_by(optimizer)
            elif keeps_buckets(optimizer):
                yield Reason.BUCKET_VIEW, held_by(optimizer)

    def joined(self, others: "Sources") -> "Sources":
        """Return these sources and others."""
        return Sources(self.optimizers + others.optimizers, self.copies + others.copies)

    def layers_at(self, path: str) -> list[nn.Module]:
        """Return the layers of the averaged copies at a path, or raise a ValueError for a copy that lacks it."""
        try:
            return [copy.get_submodule(path) for copy in self.copies if isinstance(copy, nn.Module)]
        except AttributeError as error:
            raise ValueError(f"the averaged copy has no layer at {path!r}, as the model has") from error

    def weakly(self) -> "Callable[[], Sources]":
        """Return a function that gives those sources that still exist."""
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


NO_SOURCES = Sources()


def sources_of(optimizer: Any, ema: Any, model: nn.Module) -> Sources:
    """Return one or several optimizers and averaged copies of a model as sources.

    Raises:
        TypeError: Something is neither an optimizer nor an averaged copy.
        ValueError: An averaged copy is the model itself, or tensors that share their memory with others.
    """
    optimizers = _as_tuple(optimizer)
    for each in optimizers:
        if not (hasattr(each, "state") and hasattr(each, "param_groups")):
            raise TypeError(f"expected an optimizer, or a list of them, got {type(each).__name__}")
    return Sources(optimizers, tuple(_averaged_copy(each, model) for each in _as_tuple(ema)), optimizer is None)


def find_companions(weights: Sequence[Weight], sources: Sources) -> list[Companion]:
    """Return the companions of some weights.

    Optimizer state belongs to a weight by the identity of the parameter, and follows it if it has the same shape.

    Raises:
        ValueError: An averaged copy has a weight in another shape, or lacks it; a mapping may lack some, but not all.
    """
    tensors = [weight.tensor for weight in weights]
    found = [
        Companion(weights[index], label, tensor, reason)
        for index, label, tensor, reason in _gradients_and_state(tensors, sources.optimizers)
    ]
    for copy in sources.copies:
        found += _of_copy(weights, copy)
    return found


def find_mismatched(parameters: Sequence[Tensor], optimizers: Sequence[Any]) -> list[tuple[int, str, Tensor]]:
    """Return gradients and state in another layout than their parameter, which could have its layout.

    Returns:
        The index of the parameter, the label as of a companion, and the tensor.
    """
    companions = _gradients_and_state(parameters, optimizers)
    found = [each for each in companions if each[3] is None and type(each[2]) in _PLAIN]
    apart = mismatched_layouts([parameters[each[0]] for each in found], [each[2] for each in found])
    # Nothing else can have the strides of a parameter with gaps, which no conversion has made.
    dense = torch.ops.aten.is_non_overlapping_and_dense
    return [found[each][:3] for each in apart if dense(parameters[found[each][0]])]


def _gradients_and_state(
    parameters: Sequence[Tensor], optimizers: Sequence[Any]
) -> list[tuple[int, str, Tensor, Reason | None]]:
    """Return what goes with some parameters: the parameter's index, a label, the tensor, and why it stays as it is."""
    found: list[tuple[int, str, Tensor, Reason | None]] = [
        (index, "grad", gradient, None)
        for index, parameter in enumerate(parameters)
        if (gradient := parameter.grad) is not None
    ]
    indices = {id(parameter): index for index, parameter in enumerate(parameters)} if len(optimizers) > 1 else {}
    for optimizer in optimizers:
        states = state_of(optimizer)
        # One of many optimizers may have a single parameter: not all parameters are looked up in each.
        is_small = indices and len(states) < len(parameters)
        owners = [indices[id(each)] for each in states if id(each) in indices] if is_small else range(len(parameters))
        for index in owners:
            state = states.get(parameters[index])
            if state is None:
                continue
            shape = parameters[index].shape
            for key, value in (state if isinstance(state, dict) else {"state": state}).items():
                if type(value) is Tensor:
                    if value.dim() == 0:  # a count of steps
                        continue
                    if value.dtype not in CODES and value.shape == shape and value.layout is torch.strided:
                        found.append((index, str(key), value, None))
                        continue
                found += [(index, *each) for each in _matching({key: value}, shape)]
    return found


def held_by(optimizer: Any) -> set[int]:
    """Return the ids of an optimizer's parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _of_copy(weights: Sequence[Weight], copy: AveragedCopy) -> Iterator[Companion]:
    tensors = [_tensor_of(copy, weight.name) for weight in weights]
    is_partial = isinstance(copy, Mapping) and any(tensor is not None for tensor in tensors)
    for weight, tensor in zip(weights, tensors):
        if tensor is None and is_partial:  # buffers and frozen weights are rarely averaged
            continue
        shape = weight.tensor.shape
        if tensor is None or tensor.shape != shape:
            got = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
            hint = _child_with(copy, weight.name)
            raise ValueError(f"the averaged copy has {got} at {weight.name!r}, the model has {tuple(shape)}{hint}")
        yield Companion(weight, "ema", tensor)
        if tensor.grad is not None:
            yield Companion(weight, "ema.grad", tensor.grad)


def _averaged_copy(given: Any, model: nn.Module) -> AveragedCopy:
    if given is model:
        raise ValueError("expected ema to be an averaged copy of the model, got the model itself")
    if isinstance(given, AveragedModel):
        return given.module
    if isinstance(given, nn.Module):
        return given
    if isinstance(given, Mapping):
        _expect_kept(given)
        return given
    raise TypeError(
        f"expected ema to be a module, or a mapping of names to tensors, got {type(given).__name__}: pass the averaged "
        "module that a wrapper holds, and dict(zip(names, parameters)) for a list of averaged parameters"
    )


def _expect_kept(copies: Mapping[str, Tensor]) -> None:
    """Raise a ValueError for views of other tensors: those others would stay as they are, and the views are dropped."""
    plain = {
        name: each
        for name, each in copies.items()
        if type(each) is Tensor and each.dim() in CHANNELS_LAST and each.layout is torch.strided
    }
    places = Counter(map(memory_id, plain.values()))
    own = {name: each for name, each in plain.items() if places[memory_id(each)] == 1}  # tied ones hold each other
    for memory_format in (None, torch.contiguous_format):  # at least one of the two would move the bytes
        for name, outcome in zip(own, plan_weights(list(own.values()), memory_format, storage="reuse")):
            if outcome is Outcome.HELD:
                raise ValueError(
                    f"the averaged copy {name!r} shares its memory with something else, which would not follow, as "
                    "what a module's state_dict() gives does: pass the module, or dict(module.named_parameters())"
                )


def _tensor_of(copy: Any, name: str) -> Tensor | None:
    if isinstance(copy, Mapping):
        return copy.get(name)
    path, _, own = name.rpartition(".")
    try:
        module = attrgetter(path)(copy) if path else copy
        # Reading a computed weight would compute it, which may change the copy's buffers.
        is_computed = own == "weight" and computed_weights.originals(module) is not None
        return None if is_computed else getattr(module, own)
    except AttributeError:
        return None


def _child_with(copy: Any, name: str) -> str:
    """Return a hint for an error: the child of a wrapper that has a tensor which the wrapper lacks."""
    children = copy.named_children() if isinstance(copy, nn.Module) else ()
    return next((f": pass its .{child}" for child, module in children if _tensor_of(module, name) is not None), "")


def _matching(state: Any, shape: torch.Size, prefix: str = "") -> Iterator[tuple[str, Tensor, Reason | None]]:
    """Yield the tensors in a weight's state, at any depth, and why some stay as they are."""
    items: Iterable[tuple[object, Any]] = state.items() if isinstance(state, Mapping) else enumerate(state)
    for key, value in items:
        if isinstance(value, Tensor):
            if value.shape == shape:
                yield f"{prefix}{key}", value, _reason_to_stay(value)
            elif value.dim() > 0 and value.numel() > 1:  # a count of steps is not worth a row
                yield f"{prefix}{key}", value, Reason.OTHER_SHAPE
        elif isinstance(value, (Mapping, list, tuple)):
            yield from _matching(value, shape, f"{prefix}{key}.")


def _reason_to_stay(state: Tensor) -> Reason | None:
    if type(state) not in _PLAIN or state.layout is not torch.strided:
        return Reason.OTHER_KIND
    # Kernels that read codes with the weight go by memory, too.
    return Reason.STATE_IN_THE_WAY if state.dtype in CODES else None


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Sequence) else (value,)


def _reference(optimizer: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(optimizer)
    except TypeError:  # a wrapper with slots
        return lambda: optimizer


def _alive(references: Mapping[str, TensorWeakRef]) -> dict[str, Tensor] | None:
    tensors = {name: tensor for name, reference in references.items() if (tensor := reference()) is not None}
    return tensors or None
