"""What is known of an optimizer that steps or loads, what it is told once, and laying out what it holds."""

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from torch_nhwc.formats import Strides
from torch_nhwc.ops import lay_out_weights_
from torch_nhwc.rendering import warn

_logger = logging.getLogger("torch_nhwc")


@dataclass(slots=True)
class Record:
    """An optimizer that has stepped while there was a converted layer, or could not be laid out."""

    optimizer: "weakref.ref[Optimizer]"
    generation: int = 0
    """Of converted layers, that it was last looked at as a whole."""
    told: set[str] = field(default_factory=set)
    """The kinds of warnings that it has had."""
    lent: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    """For the time of a step, gradients that a copy stands in for: the parameter, its gradient and the copy."""
    behind_own_hooks: RemovableHandle | None = None
    """For the time of a step, the guard behind the optimizer's own hooks."""


_records: dict[int, Record] = {}  # by identity, since an optimizer's class may have an equality of its own


def record_of(optimizer: Optimizer) -> Record:
    """The record of an optimizer, for as long as that lives."""
    identity = id(optimizer)
    if identity not in _records:
        _records[identity] = Record(weakref.ref(optimizer, lambda _: _records.pop(identity, None)))
    return _records[identity]


def recorded() -> list[Optimizer]:
    """All optimizers that have a record."""
    return [each for record in list(_records.values()) if (each := record.optimizer()) is not None]


def warn_once(kind: str, optimizer: Optimizer, problem: str) -> None:
    """Warns of an optimizer, once for each kind; where that is an error, it is logged: a step never fails by it."""
    told = record_of(optimizer).told
    if kind not in told:
        told.add(kind)
        message = f"torch_nhwc: {type(optimizer).__name__}: {problem}"
        try:
            warn(message)
        except Exception:
            _logger.warning(message)


def warn_of_failure(optimizer: Optimizer, error: Exception) -> None:
    """Warns, once for each optimizer, that its gradients or state may not lie as its parameters, and why."""
    reason = str(error).split("\n")[0]
    problem = f"what it holds of its parameters cannot be laid out as they are, and it may step wrong: {reason}"
    warn_once("failed", optimizer, problem)


def lay_out(tensors: Sequence[Tensor], strides: Sequence[Strides]) -> None:
    """Lays out tensors as far as they can be; then raises the error of one that cannot."""
    try:
        lay_out_weights_(tensors, strides, storage="detach")
    except RuntimeError:
        if len(tensors) == 1:
            raise
        failure = None
        for tensor, wanted in zip(tensors, strides):
            try:
                lay_out([tensor], [wanted])
            except RuntimeError as error:
                failure = error
        if failure:
            raise failure from None
