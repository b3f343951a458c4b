"""What an optimizer needs of the layout of its parameters."""

import inspect
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from torch.optim import Optimizer

# Those that make one flat vector of all their parameters, which takes contiguous ones: by the name of a class or base.
FLATTENING = frozenset({"LBFGS"})


def flattens_parameters(optimizer: Optimizer) -> bool:
    """Whether an optimizer takes contiguous parameters only."""
    return not FLATTENING.isdisjoint(base.__name__ for base in type(optimizer).__mro__)


def keeps_buckets(optimizer: Optimizer) -> bool:
    """Whether an optimizer makes its parameters views of flat buckets, in contiguous strides."""
    options = ("parameters_as_bucket_view", "_overlap_with_ddp")
    return _is_zero(optimizer) and any(getattr(optimizer, option, False) for option in options)


def state_of(optimizer: Any) -> Any:
    """The state that an optimizer steps with, by its parameters: of ZeRO's, that of the optimizer inside."""
    inside = getattr(optimizer, "optim", None) if _is_zero(optimizer) else None
    return getattr(inside, "state", optimizer.state)  # a functional one inside keeps its own


def _is_zero(optimizer: Any) -> bool:
    return any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__)


def with_inner(optimizer: Any) -> Iterator[Any]:
    """An optimizer, and those that it wraps, as Lookahead and SAM do, one inside of the other."""
    seen: set[int] = set()
    while optimizer is not None and id(optimizer) not in seen:
        yield optimizer
        seen.add(id(optimizer))
        own = getattr(optimizer, "__dict__", {})  # a wrapper may have slots
        inside = (own.get(name) for name in ("optimizer", "base_optimizer"))
        optimizer = next((each for each in inside if isinstance(each, Optimizer)), None)


def is_from_elsewhere(optimizer: Optimizer) -> bool:
    """Whether an optimizer's class is not one of PyTorch's own."""
    return any(True for _ in _bases_from_elsewhere(type(optimizer)))


@cache
def calls_view(optimizer_type: type) -> bool:
    """Whether the code of an optimizer from elsewhere calls `.view(...)`, as those do that normalise by channel.

    A guess from the source: not every call of view is one that a channels-last tensor makes raise.
    """
    return any(re.search(r"\.view\(", source) for source in _sources(optimizer_type))


def _sources(optimizer_type: type) -> Iterator[str]:
    for base in _bases_from_elsewhere(optimizer_type):
        try:
            yield inspect.getsource(base)
        except (OSError, TypeError):  # made without a file
            continue


def _bases_from_elsewhere(optimizer_type: type) -> Iterator[type]:
    return (each for each in optimizer_type.__mro__ if each is not object and not each.__module__.startswith("torch."))
