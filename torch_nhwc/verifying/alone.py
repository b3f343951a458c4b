"""Running one layer by itself: what it returns, the gradients of what it was given and of its parameters."""

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_nhwc.running.nested import mapped, tensors_in
from torch_nhwc.running.rehearsal import restore_afterwards
from torch_nhwc.verifying.differences import can_have_gradient
from torch_nhwc.verifying.inputs import Change, Inputs, as_it_is, laid_out, laid_out_like

Results = dict[Any, Tensor]
"""What was computed, by what it is called."""


class DrawInLogicalOrder(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Random numbers are drawn as for contiguous tensors, so that dropout has one mask in both formats."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.has_drawn = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which would import the compiler, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.has_drawn = True
        in_order = [each.contiguous() if isinstance(each, Tensor) else each for each in args]
        result = func(*in_order, **kwargs)
        first = next((each for each in args if isinstance(each, Tensor)), None)
        originals: dict[int, Tensor] = {}
        for argument, own, other in zip(func._schema.arguments, args, in_order):
            if argument.alias_info is not None and argument.alias_info.is_write and own is not other:
                own.copy_(other)
                originals[id(other)] = own

        def as_given(_: str, tensor: Tensor) -> Tensor:
            if id(tensor) in originals:
                return originals[id(tensor)]
            return laid_out_like(tensor, first) if first is not None and tensor.shape == first.shape else tensor

        return mapped(result, "", as_given)


@contextmanager
def repeatable(*models: nn.Module) -> Iterator[None]:
    """Everything random starts from one seed and ends as it was, and so do the buffers; gradients are recorded."""
    with ExitStack() as stack:
        restore_afterwards(stack, *models)
        # What a region has cast before, or what is cast here, is not for the other.
        torch.clear_autocast_cache()
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        seed(0)
        yield
        stack.close()  # by the end of the block an interrupt would come too late to be seen


def seed(number: int) -> None:
    """Starts the random generators that `repeatable` brings back; none that is not there yet."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call, unused-ignore]
        torch.cuda.manual_seed_all(number)
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number)


def gradient_for(output: Tensor, number: int) -> Tensor:
    """What arrives at an output in backward: the same numbers in every dtype."""
    generator = torch.Generator().manual_seed(number)
    # Rounded to bfloat16, whose numbers all dtypes have.
    drawn = torch.randn(output.shape, generator=generator, dtype=torch.float32).bfloat16()
    return drawn.to(device=output.device, dtype=output.dtype)


class Formats(NamedTuple):
    """Which images come in channels-last: those that a layer is given, and the gradients that arrive at its outputs."""

    inputs: bool
    gradients: bool

    def __str__(self) -> str:
        if self.inputs:
            return ", channels-last" + ("" if self.gradients else ", contiguous gradients")
        return ", channels-last gradients" if self.gradients else ""


CONTIGUOUS, CHANNELS_LAST = Formats(False, False), Formats(True, True)
IMAGE_FORMATS = Formats(False, True), Formats(True, False), CHANNELS_LAST


def run_layer(
    layer: nn.Module, inputs: Inputs, formats: Formats, backward: bool, change: Change = as_it_is
) -> tuple[Results, bool]:
    """What a layer makes of inputs, by what it is called, and whether it has drawn random numbers.

    Outputs, gradients of inputs and parameters, and the buffers that it changes. The layer and the inputs are
    afterwards what they were, and no parameter has a gradient from it.

    Args:
        layer: to be run, in its own mode.
        inputs: for the layer; it gets copies.
        formats: of images among the inputs, and of a random gradient for each output.
        backward: whether gradients are wanted.
        change: of the inputs, and of the gradients that arrive.
    """
    inputs = inputs.mapped(change)
    with repeatable(layer), DrawInLogicalOrder() as draws:
        leaves: Results = {}

        def fresh(name: str, tensor: Tensor) -> Tensor:
            tensor = laid_out(tensor.detach(), formats.inputs)
            if not (backward and can_have_gradient(tensor)):
                return tensor
            leaves[name] = tensor.requires_grad_()
            return tensor.clone()  # which a layer may write to

        given = inputs.mapped(fresh)
        before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
        outputs = dict(tensors_in(layer(*given.args, **given.kwargs), "output"))
        has_drawn = draws.has_drawn  # before the gradients that arrive are drawn
        results = {name: output.detach().clone() for name, output in outputs.items()}
        for name, buffer in layer.named_buffers():
            if name in before and not torch.equal(before[name], buffer):
                results[name] = buffer.detach().clone()
        wanted = leaves | {name: each for name, each in layer.named_parameters() if each.requires_grad}
        ends = [output for output in outputs.values() if output.requires_grad]
        if backward and wanted and ends:
            gradients = [
                laid_out(change(f"gradient {number}", gradient_for(end, number)), formats.gradients)
                for number, end in enumerate(ends)
            ]
            found = torch.autograd.grad(ends, list(wanted.values()), gradients, allow_unused=True)
            results |= {f"gradient of {name}": each.detach() for name, each in zip(wanted, found) if each is not None}
        return results, has_drawn
