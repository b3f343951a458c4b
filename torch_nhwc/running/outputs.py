"""Comparing what two models return, and their weights."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_nhwc.running.nested import tensors_in

# How far an output may lie from the contiguous model's, in units of the largest output: other kernels add in another
# order, and a deep network carries the rounding of its dtype along.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.float16: 5e-2, torch.bfloat16: 2e-1}


def tensors_of(output: Any) -> Iterator[Tensor]:
    """The tensors in whatever a model returns."""
    return (tensor for _, tensor in tensors_in(output, ""))


def first_tensor(output: Any) -> Tensor:
    """The first tensor of whatever a model returns.

    Raises:
        ValueError: there is none.
    """
    for tensor in tensors_of(output):
        return tensor
    raise ValueError(f"expected the model to return a tensor, got {type(output).__name__}")


class Difference(NamedTuple):
    """How far an output lies from another."""

    largest: float
    """Of the differences of two elements."""
    of: float
    """The largest output."""
    tolerance: float
    """As far as the output may lie from the other one."""

    @property
    def is_within(self) -> bool:
        """Whether it is near enough; not where there is a NaN."""
        return self.largest <= self.tolerance


def difference_of(output: Tensor, reference: Tensor, dtype: torch.dtype) -> Difference:
    """The difference of two tensors, of which the second one is right, from a model that computes in a dtype."""
    of = reference.double().abs().max().item() if reference.numel() else 0.0
    tolerance = of * TOLERANCES.get(dtype, max(TOLERANCES.values()))
    if output.shape != reference.shape:
        return Difference(float("inf"), of, tolerance)
    return Difference(
        (output.double() - reference.double()).abs().max().item() if output.numel() else 0.0, of, tolerance
    )


def equal_weights(a: nn.Module, b: nn.Module) -> bool:
    """Whether all parameters of two models are equal bit for bit, whatever their layouts are."""
    return all(torch.equal(_bits(p), _bits(q)) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
