"""Whether modules are in training."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def modes_of(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Modules with whether they are in training; without frozen ones of TorchScript, which are in no mode."""
    return [(module, module.training) for module in model.modules() if hasattr(module, "training")]


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Has a model in evaluation, and every module in its own mode afterwards."""
    modes = modes_of(model)
    try:
        if modes:
            model.eval()
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
