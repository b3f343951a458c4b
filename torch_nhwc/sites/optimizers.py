"""The optimizers that need contiguous parameters, and where an optimizer keeps its state."""

from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer

# Optimizers that make one flat vector of their parameters, by the name of their class or of one of its bases.
FLATTENING = frozenset({"LBFGS"})


def flattens_parameters(optimizer: Any) -> bool:
    """Return whether an optimizer takes only contiguous parameters."""
    return not FLATTENING.isdisjoint(base.__name__ for base in type(optimizer).__mro__)


def keeps_buckets(optimizer: Any) -> bool:
    """Return whether an optimizer makes its parameters views of flat buckets, with contiguous strides."""
    options = ("parameters_as_bucket_view", "_overlap_with_ddp")
    return _is_zero(optimizer) and any(getattr(optimizer, option, False) for option in options)


def state_of(optimizer: Any) -> Any:
    """Return the state that an optimizer steps with, by parameter; ZeRO's is in the optimizer inside of it."""
    inside = getattr(optimizer, "optim", None) if _is_zero(optimizer) else None
    return getattr(inside, "state", optimizer.state)  # a functional optimizer inside keeps its own


def with_inner(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and those that it wraps, one inside of the other, as Lookahead and accelerate do."""
    seen: set[int] = set()
    while optimizer is not None and id(optimizer) not in seen:
        yield optimizer
        seen.add(id(optimizer))
        own = getattr(optimizer, "__dict__", {})  # a wrapper may have slots
        inside = (own.get(name) for name in ("optimizer", "base_optimizer"))
        optimizer = next((each for each in inside if isinstance(each, Optimizer)), None)


def _is_zero(optimizer: Any) -> bool:
    return any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__)
