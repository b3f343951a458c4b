"""What several parts draw and compare."""

from collections.abc import Sequence
from random import Random

import torch
from reference import bits
from torch import Tensor


def order_of_dims(random: Random, rank: int) -> list[int]:
    """Draw an order of dimensions in memory: contiguous, channels-last or any."""
    dims = [*range(rank)]
    kind = random.random()
    if kind < 0.35 and rank > 1:
        dims.append(dims.pop(1))
    elif kind > 0.7:
        random.shuffle(dims)
    return dims


def strides_of(
    shape: Sequence[int], order: Sequence[int], steps: Sequence[int] | None = None, expanded: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return strides that put dimensions into an order, the last one innermost.

    Args:
        shape: The sizes.
        order: The dimensions, the outermost first.
        steps: For each dimension, how far apart its elements are, in units of what is inside of them.
        expanded: Dimensions whose elements are all the same.
    """
    strides, stride = [0] * len(shape), 1
    for dim in reversed(order):
        if dim not in expanded:
            stride *= steps[dim] if steps else 1
            strides[dim] = stride
            stride *= max(shape[dim], 1)
    return tuple(strides)


def in_order(tensor: Tensor, order: Sequence[int]) -> Tensor:
    """Return the same values with dimensions in an order, in memory of their own."""
    return torch.empty_strided(tensor.shape, strides_of(tensor.shape, order), dtype=tensor.dtype).copy_(tensor)


def has_bits_of(actual: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors have the same elements bit by bit, where every NaN equals every other one."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if torch.equal(bits(actual), bits(expected)):
        return True
    return actual.dtype.is_floating_point and torch.allclose(
        actual.detach().double(), expected.detach().double(), rtol=0, atol=0, equal_nan=True
    )


def expect(condition: object, what: str) -> None:
    """Raise an AssertionError that says what was expected."""
    if not condition:
        raise AssertionError(what)
