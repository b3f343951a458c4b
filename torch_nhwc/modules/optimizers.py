"""What an optimizer needs of the layout of its parameters."""

import inspect
import re
from collections.abc import Iterator

from torch.optim import Optimizer

# Those that make one flat vector of all their parameters, which takes contiguous ones: by the name of a class or base.
FLATTENING = frozenset({"LBFGS"})


def flattens_parameters(optimizer: Optimizer) -> bool:
    """Whether an optimizer takes contiguous parameters only."""
    return not FLATTENING.isdisjoint(base.__name__ for base in type(optimizer).__mro__)


def views_parameters(optimizer: Optimizer) -> bool:
    """Whether the code of an optimizer from elsewhere calls `.view(...)`, as those do that normalise by channel.

    A guess from the source: not every call of view is one that a channels-last tensor makes raise.
    """
    return any(re.search(r"\.view\(", source) for source in _sources_from_elsewhere(type(optimizer)))


def _sources_from_elsewhere(optimizer_type: type) -> Iterator[str]:
    for base in optimizer_type.__mro__:
        if base is not object and not base.__module__.startswith("torch."):
            try:
                yield inspect.getsource(base)
            except (OSError, TypeError):  # made without a file
                continue
