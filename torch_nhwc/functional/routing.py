"""Which calls are for PyTorch's own functions, whatever the strides are."""

from typing import Any

import torch
from torch import Tensor, nn

_LISTS = (tuple, list, torch.Size)
NUMBER, NONE = (int, float), type(None)
# Of other classes only they themselves know what a call means.
_PLAIN = frozenset((Tensor, nn.Parameter, NONE))


def is_theirs(*tensors: Any) -> bool:
    """Whether a call goes to PyTorch: of a tensor subclass or a tracer's stand-in, while a compiler or ONNX traces."""
    is_traced = torch.compiler.is_compiling() or (torch._C._is_tracing() and torch.onnx.is_in_onnx_export())
    return is_traced or not _PLAIN.issuperset(map(type, tensors))


def are(kinds: tuple[type, ...], *values: Any) -> bool:
    """Whether values are of exactly these types; PyTorch takes, traces or refuses all others by its own rules."""
    for value in values:  # noqa: SIM110  an expression that generates takes a microsecond more
        if type(value) not in kinds:
            return False
    return True


def are_sizes(*values: Any, kinds: tuple[type, ...] = (int,), count: int = 3) -> bool:
    """Whether each value is one plain number, or one for each of some dimensions."""
    return all(
        type(value) is int or (type(value) in _LISTS and len(value) == count and are(kinds, *value)) for value in values
    )
