"""Which calls are for PyTorch's own functions, whatever the strides are."""

from typing import Any

import torch
from torch import Tensor, nn

# Of other classes only they themselves know what a call means.
_PLAIN = (Tensor, nn.Parameter)


def is_theirs(*tensors: Any) -> bool:
    """Whether a call goes to PyTorch: of a tensor subclass or a tracer's stand-in, and while a compiler traces."""
    return torch.compiler.is_compiling() or any(type(each) not in _PLAIN for each in tensors if each is not None)
