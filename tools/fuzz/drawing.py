"""What several parts draw and compare."""

from collections.abc import Sequence
from math import prod
from random import Random
from typing import NamedTuple

import torch
from reference import bits
from torch import Tensor

# Elements of a tensor, and multiplications of a forward pass: larger convolutions would take most of the time.
LARGEST, MOST = 50_000, 2_000_000
CHANNELS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 32, 48, 64)


class Convolution(NamedTuple):
    """A convolution and the sizes of its input. Every tuple has an entry for each spatial dimension."""

    transposed: bool
    batch: int
    groups: int
    in_channels: int
    out_channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    size: tuple[int, ...]
    bias: bool

    @property
    def output(self) -> tuple[int, ...]:
        """The spatial size of the output."""
        axes = zip(self.size, self.kernel, self.stride, self.padding, self.dilation, self.output_padding)
        if self.transposed:
            return tuple((n - 1) * s - 2 * p + d * (k - 1) + more + 1 for n, k, s, p, d, more in axes)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d, _ in axes)

    @property
    def weight(self) -> tuple[int, ...]:
        """The shape of the weight."""
        first, second = self.out_channels, self.in_channels
        if self.transposed:
            first, second = second, first
        return first, second // self.groups, *self.kernel

    @property
    def is_small(self) -> bool:
        """Whether the convolution takes little time."""
        x, y = self.in_channels * prod(self.size), self.out_channels * prod(self.output)
        multiplications = self.batch * prod(self.size if self.transposed else self.output) * prod(self.weight)
        return max(self.batch * x, self.batch * y, prod(self.weight)) <= LARGEST and multiplications <= MOST

    @property
    def kind(self) -> str:
        """What convolutions are counted by."""
        per_group = self.in_channels // self.groups
        connected = "dense" if self.groups == 1 else "depthwise" if per_group == 1 else "grouped"
        return f"{len(self.size)}D {'transposed ' if self.transposed else ''}{connected}"


def draw_convolution(random: Random, space: int, transposed: bool) -> Convolution:
    """Draw a small convolution, one that is at the edges of oneDNN's rules more often than those of networks are."""
    while True:
        drawn = _convolution(random, space, transposed)
        if min(drawn.output) >= 1 and drawn.is_small:
            return drawn


def _convolution(random: Random, space: int, transposed: bool) -> Convolution:
    kind = random.random()
    is_pointwise = kind < 0.15
    # AMX packs taps as channels: products of powers of 2.
    is_packed = 0.15 <= kind < 0.25

    def per_axis(values: Sequence[int]) -> tuple[int, ...]:
        """Draw one value for all axes, as most layers have, or one for each."""
        if random.random() < 0.5:
            return (random.choice(values),) * space
        return tuple(random.choice(values) for _ in range(space))

    kernel = (1,) * space if is_pointwise else per_axis((1, 4, 8) if is_packed else range(1, 10))
    stride = per_axis((1, 2, 2, 3) if is_pointwise else (1, 4, 8) if is_packed else (1, 1, 2, 2, 3, 4))
    if random.random() < 0.1:
        stride = tuple(k + random.randint(0, 2) for k in kernel)
    dilation = per_axis((1, 1, 1, 2, 3))
    most = [0 if is_packed else (k - 1) * d for k, d in zip(kernel, dilation)]
    drawn = [random.choice((0, reach // 2, reach // 2, reach, random.randint(0, reach))) for reach in most]
    more = per_axis((0, 0, 1, 2)) if transposed else (0,) * space
    groups = random.choice((1, 1, 1, 2) if is_pointwise or is_packed else (1, 1, 2, 3, 4, 8, 16, 32, 64))
    is_depthwise = groups > 1 and random.random() < 0.6
    channels = random.choice(range(1, 20) if is_pointwise else (8, 12, 16, 24) if is_packed else CHANNELS)
    return Convolution(
        transposed=transposed,
        batch=random.choice((1, 1, 2, 3, 4)),
        groups=groups,
        in_channels=groups * (1 if is_depthwise else channels),
        out_channels=groups * (random.choice((1, 1, 2, 3)) if is_depthwise else random.choice(CHANNELS)),
        kernel=kernel,
        stride=stride,
        padding=tuple(drawn),
        dilation=dilation,
        output_padding=tuple(min(m, max(s, d) - 1) for m, s, d in zip(more, stride, dilation)),
        size=per_axis((4, 8, 16, 32) if is_packed else range(1, random.choice((5, 9, 17, 40)))),
        bias=random.random() < 0.7,
    )


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
