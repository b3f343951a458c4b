"""Comparing what two models return, and their weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

# How far an output may lie from the contiguous model's, in units of the largest output: other kernels add in another
# order, and a deep network carries the rounding of its dtype along.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 2e-1}


def first_tensor(output: Any) -> Tensor:
    """The first tensor of whatever a model returns."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    return next(first_tensor(value) for value in values if value is not None)


def equal_weights(a: nn.Module, b: nn.Module) -> bool:
    """Whether all parameters of two models are equal bit for bit, whatever their layouts are."""
    return all(torch.equal(_bits(p), _bits(q)) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
