"""Run one module by itself so that it can be repeated, on inputs in either format."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torch_nhwc.layout import CHANNELS_LAST
from torch_nhwc.running.calls import Draws, preserved_state
from torch_nhwc.running.containers import map_tensors, tensors_in

Change = Callable[[Tensor], Tensor]
"""Makes another tensor of one."""
Results = dict[str, Tensor]
"""What a module computes, by name."""


class Inputs(NamedTuple):
    """Positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def named(self) -> list[tuple[str, Tensor]]:
        """Return the tensors: `input` is the first positional argument, `input 2` the second; others have keywords."""
        names = ["input" if index == 0 else f"input {index + 1}" for index in range(len(self.args))]
        values = zip((*names, *self.kwargs), (*self.args, *self.kwargs.values()))
        return [pair for name, value in values for pair in tensors_in(value, name)]

    def mapped(self, change: Change) -> "Inputs":
        """Return the same arguments with other tensors."""
        return Inputs(*map_tensors(tuple(self), change))


class Formats(NamedTuple):
    """Which images are channels-last: a module's inputs, and the gradients of its outputs."""

    inputs: bool
    gradients: bool

    def __str__(self) -> str:
        """Return what follows the description of the inputs."""
        if self.inputs:
            return ", channels-last" + ("" if self.gradients else ", contiguous gradients")
        return ", channels-last gradients" if self.gradients else ""


BOTH_CONTIGUOUS, BOTH_CHANNELS_LAST = Formats(False, False), Formats(True, True)
LAYER_FORMATS = Formats(False, True), Formats(True, False), BOTH_CHANNELS_LAST


def run_module(
    module: nn.Module, inputs: Inputs, formats: Formats, backward: bool, change: Change = Tensor.clone
) -> tuple[Results, bool]:
    """Return what a module computes, and whether it draws random numbers.

    The results are outputs, gradients of inputs and of parameters, and buffers that change. The module and the inputs
    stay as they are, and no parameter gets a gradient.

    Args:
        module: The module, which runs in its own mode.
        inputs: Its inputs; it gets copies.
        formats: The formats of the images, and of the random gradients of the outputs.
        backward: Whether to compute gradients.
        change: Changes the inputs, and the gradients of the outputs.
    """
    with repeatable(module), _DrawInLogicalOrder() as draws:
        given = inputs.mapped(lambda tensor: _leaf(laid_out(change(tensor.detach()), formats.inputs), backward))
        leaves = {name: tensor for name, tensor in given.named() if tensor.requires_grad}
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        copies = given.mapped(Tensor.clone)  # a module may write to its inputs, but not to leaves
        outputs = dict(tensors_in(module(*copies.args, **copies.kwargs), "output"))
        results = {name: output.detach().clone() for name, output in outputs.items()}
        for name, buffer in module.named_buffers():
            if name in before and not torch.equal(before[name], buffer):
                results[name] = buffer.detach().clone()
        is_random = draws.has_drawn
        sources = leaves | {name: each for name, each in module.named_parameters() if each.requires_grad}
        ends = [output for output in outputs.values() if output.requires_grad]
        if backward and sources and ends:
            arriving = [
                laid_out(change(_random_like(end, number)), formats.gradients) for number, end in enumerate(ends)
            ]
            found = torch.autograd.grad(ends, list(sources.values()), arriving, allow_unused=True)
            results |= {f"gradient of {name}": each.detach() for name, each in zip(sources, found) if each is not None}
        return results, is_random


@contextmanager
def repeatable(*models: nn.Module) -> Iterator[None]:
    """Seed the random generators and record gradients; see `preserved_state`."""
    with preserved_state(*models), torch.inference_mode(False), torch.enable_grad():
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call, unused-ignore]
            torch.cuda.manual_seed_all(0)
        random.seed(0)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(0)
        yield


def is_image(tensor: Tensor) -> bool:
    """Return whether a tensor can be channels-last."""
    return tensor.dim() in CHANNELS_LAST and tensor.layout == torch.strided


def laid_out(tensor: Tensor, channels_last: bool) -> Tensor:
    """Return a copy; images in canonical strides."""
    if not is_image(tensor):
        return tensor.clone()
    return tensor.clone(memory_format=CHANNELS_LAST[tensor.dim()] if channels_last else torch.contiguous_format)


def can_have_gradient(tensor: Tensor) -> bool:
    """Return whether a tensor is of a dtype that gradients have."""
    return tensor.is_floating_point() or tensor.is_complex()


class _DrawInLogicalOrder(Draws):  # type: ignore[no-untyped-call, unused-ignore]
    """Draws random numbers as for contiguous tensors, so that dropout has the same mask in both formats."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        self.has_drawn = True
        in_order = [each.contiguous() if isinstance(each, Tensor) else each for each in args]
        result = func(*in_order, **kwargs)
        first = next((each for each in args if isinstance(each, Tensor)), None)
        written: dict[int, Tensor] = {}
        for argument, own, other in zip(func._schema.arguments, args, in_order):
            if argument.alias_info is not None and argument.alias_info.is_write and own is not other:
                own.copy_(other)
                written[id(other)] = own

        def as_given(tensor: Tensor) -> Tensor:
            if id(tensor) in written:
                return written[id(tensor)]
            if first is None or tensor.shape != first.shape:
                return tensor
            return torch.empty_like(first, dtype=tensor.dtype).copy_(tensor)

        return map_tensors(result, as_given)


def _leaf(tensor: Tensor, backward: bool) -> Tensor:
    return tensor.requires_grad_(backward and can_have_gradient(tensor))


def _random_like(output: Tensor, number: int) -> Tensor:
    """Return a random gradient for an output: the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(number)
    # All dtypes can represent numbers that are rounded to bfloat16.
    drawn = torch.randn(output.shape, generator=generator, dtype=torch.float32).bfloat16()
    return drawn.to(device=output.device, dtype=output.dtype)
