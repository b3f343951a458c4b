"""Running a model once on example inputs, so that nothing of it is there afterwards."""

import random
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_nhwc.modules.walk import walk


def rehearse(model: nn.Module, example_inputs: Any, prepare: Callable[[ExitStack], object]) -> None:
    """Runs a model once, without gradients and in its own mode; buffers and random generators are brought back.

    Args:
        model: to be run.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword ones.
        prepare: called right before; what it enters on the stack ends with the run.
    """
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}
    if isinstance(example_inputs, Mapping):
        keywords = dict(example_inputs)
    else:
        arguments = tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    with ExitStack() as stack:
        _restore_afterwards(stack, model)
        # A weight that an autocast region has cast before would not be recognised, and one that is cast here, without
        # a gradient, must not be there afterwards.
        torch.clear_autocast_cache()
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(torch.no_grad())
        prepare(stack)
        model(*arguments, **keywords)
        stack.close()  # by the end of the block an interrupt would come too late to be seen


def _restore_afterwards(stack: ExitStack, model: nn.Module) -> None:
    """Has buffers and random generators brought back, whatever happens in between."""
    callbacks: list[Callable[[], object]] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(random.setstate, random.getstate()),
    ]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call, unused-ignore]
        callbacks.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        callbacks.append(partial(numpy.random.set_state, numpy.random.get_state()))
    for _, module, _ in walk(model):
        if isinstance(module, torch.jit.ScriptModule):
            callbacks += [partial(_put_back, buffer, buffer.detach().clone()) for buffer in module.buffers()]
            continue
        callbacks.append(partial(_put_back_all, module._buffers, dict(module._buffers)))
        for buffer in module._buffers.values():
            if buffer is not None:
                callbacks.append(partial(_put_back, buffer, buffer.detach().clone()))
    # Twice: where an interrupt ends the first, the second goes on.
    stack.callback(_call_all, callbacks)
    stack.callback(_call_all, callbacks)


def _call_all(pending: list[Callable[[], object]]) -> None:
    """Calls functions, the last one first, each of which may be called again."""
    while pending:
        pending[-1]()
        pending.pop()


def _put_back_all(buffers: dict[str, Tensor | None], before: dict[str, Tensor | None]) -> None:
    buffers.clear()
    buffers.update(before)


def _put_back(buffer: Tensor, values: Tensor) -> None:
    has_values = not buffer.is_meta and not hasattr(buffer, "fake_mode")
    if buffer.shape != values.shape:  # observers of quantization do that
        buffer.resize_(values.shape)
    if has_values and not torch.equal(buffer, values):
        buffer.detach().copy_(values)
