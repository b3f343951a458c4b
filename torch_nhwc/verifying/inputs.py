"""What a layer is called with, laid out in either format, and changed so that it shows what a friendly input hides."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from torch_nhwc.formats import CHANNELS_LAST, CONTIGUOUS, Format
from torch_nhwc.running.nested import mapped, tensors_in

Change = Callable[[str, Tensor], Tensor]
"""Makes another tensor of one, which it knows by its name as well."""
AS_GIVEN, LARGE_MEAN = "as given", "a large mean"


class Inputs(NamedTuple):
    """Positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor: `input` is the first positional argument, `input 2` the second; others go by their keyword."""
        for name, value in self._values():
            yield from tensors_in(value, name)

    def mapped(self, function: Change) -> "Inputs":
        """The same with other tensors. One that is there several times is mapped once, and stays one."""
        done: dict[int, Tensor] = {}

        def once(name: str, tensor: Tensor) -> Tensor:
            if id(tensor) not in done:
                done[id(tensor)] = function(name, tensor)
            return done[id(tensor)]

        values = [mapped(value, name, once) for name, value in self._values()]
        count = len(self.args)
        return Inputs(tuple(values[:count]), dict(zip(self.kwargs, values[count:])))

    def _values(self) -> Iterator[tuple[str, Any]]:
        for index, value in enumerate(self.args):
            yield f"input {index + 1}" if index else "input", value
        yield from self.kwargs.items()


def is_image(tensor: Tensor) -> bool:
    """Whether a tensor is one that has a channels-last format."""
    return tensor.dim() in CHANNELS_LAST and tensor.layout == torch.strided


def laid_out(tensor: Tensor, channels_last: bool) -> Tensor:
    """A fresh copy of a tensor; images in canonical strides."""
    if not is_image(tensor):
        return tensor.clone()
    wanted = Format(None) if channels_last else CONTIGUOUS
    strides = wanted.strides(tensor.shape)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def laid_out_like(values: Tensor, tensor: Tensor) -> Tensor:
    """A fresh copy of values in the strides of another tensor of their shape, where that is dense."""
    return torch.empty_like(tensor, dtype=values.dtype).copy_(values)


def variants(inputs: Inputs, of_model: bool = False) -> Iterator[tuple[str, Inputs]]:
    """The inputs as they are, and where there are images among them also changed, each with what it is called.

    A large mean shows a variance that is computed as a difference of squares, a constant channel what divides by a
    deviation, a batch of 1 and of 2 what takes a short cut there. Of a whole model only the batch changes: its first
    layers would hide the rest.
    """
    yield AS_GIVEN, inputs
    images = [tensor for _, tensor in inputs.named() if is_image(tensor) and tensor.is_floating_point()]
    if not images or not all(tensor.numel() for tensor in images):
        return
    if not of_model:
        yield LARGE_MEAN, inputs.mapped(with_large_mean)
        yield "a constant channel", inputs.mapped(_with_constant_channel)
    batch = images[0].size(0)
    for size in (1, 2):
        if batch != size:
            yield f"a batch of {size}", inputs.mapped(partial(_of_batch, batch, size))


def as_it_is(_: str, tensor: Tensor) -> Tensor:
    """Changes nothing."""
    return tensor


def with_large_mean(_: str, tensor: Tensor) -> Tensor:
    """Images with a mean of a thousand deviations, or as many as leave a twentieth of one in the dtype's rounding."""
    if not (is_image(tensor) and tensor.is_floating_point()):
        return tensor
    deviation = tensor.float().std(correction=0).nan_to_num(1.0, 1.0, 1.0)
    count = min(1000.0, 0.05 / torch.finfo(tensor.dtype).eps)
    return tensor + (count * (deviation + (deviation == 0))).to(tensor.dtype)


def _with_constant_channel(_: str, tensor: Tensor) -> Tensor:
    if not (is_image(tensor) and tensor.is_floating_point()):
        return tensor
    changed = tensor.clone()
    changed[:, 0] = 1
    return changed


def _of_batch(batch: int, size: int, _: str, tensor: Tensor) -> Tensor:
    if tensor.dim() == 0 or tensor.size(0) != batch:
        return tensor
    return tensor[:size] if batch > size else torch.cat([tensor, tensor.roll(1, -1)])


def _rounded_otherwise(number: int, name: str, tensor: Tensor) -> Tensor:
    """Changes each element by a few units in its last place."""
    if not tensor.is_floating_point():
        return tensor
    generator = torch.Generator().manual_seed(crc32(f"{number} {name}".encode()))
    noise = torch.randn(tensor.shape, generator=generator).to(tensor)
    return tensor * (1 + 4 * torch.finfo(tensor.dtype).eps * noise)


ROUNDINGS: list[Change] = [partial(_rounded_otherwise, 0), partial(_rounded_otherwise, 1)]
