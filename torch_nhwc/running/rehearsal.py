"""Running a model once on example inputs, so that nothing of it is there afterwards."""

import pickle
import random
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_nhwc.modules.walk import walk
from torch_nhwc.running.inputs import call


def rehearse(model: nn.Module, example_inputs: Any, prepare: Callable[[ExitStack], object]) -> None:
    """Runs a model once, without gradients and in its own mode; buffers and random generators are brought back.

    What is compiled runs as it was before, since PyTorch compiles nothing while somebody looks on.

    A process has one of each generator for all of its threads. PyTorch's are brought back where the thread of the run
    has drawn, or something has seeded them, those of Python and NumPy where they have changed: numbers that other
    threads have drawn from one meanwhile then come again.

    Args:
        model: to be run.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword ones.
        prepare: called right before; what it enters on the stack ends with the run.

    Raises:
        TypeError: a shape was given where tensors are wanted.
    """
    with ExitStack() as stack:
        drawing = _Drawing()
        restore_afterwards(stack, model, drawing=drawing)
        # A weight that an autocast region has cast before would not be recognised, and one that is cast here, without
        # a gradient, must not be there afterwards.
        torch.clear_autocast_cache()
        stack.callback(torch.clear_autocast_cache)
        stack.enter_context(torch.no_grad())
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        prepare(stack)
        stack.enter_context(drawing)
        call(model, example_inputs)
        stack.close()  # by the end of the block an interrupt would come too late to be seen


class _Drawing(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Notes whether this thread draws random numbers, or anyone seeds."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.seed = torch.initial_seed()
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.has_drawn |= torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        return func(*args, **(kwargs or {}))

    def put_back(self, set_state: Callable[[Any], object], state: Any) -> None:
        """Has one of PyTorch's generators go on where it was."""
        if self.has_drawn or torch.initial_seed() != self.seed:
            set_state(state)


def restore_afterwards(stack: ExitStack, *models: nn.Module, drawing: _Drawing | None = None) -> None:
    """Has the buffers of models and random generators brought back, whatever happens in between.

    Args:
        stack: at whose end that is.
        models: whose buffers they are.
        drawing: what sees whether numbers are drawn; without it, PyTorch's generators are brought back in any case.
    """
    callbacks = _generators(_set if drawing is None else drawing.put_back)
    for module in (module for model in models for _, module, _ in walk(model)):
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


def _put_back_changed(get_state: Callable[[], Any], set_state: Callable[[Any], object], state: Any) -> None:
    if pickle.dumps(get_state()) != pickle.dumps(state):  # NumPy's has an array inside
        set_state(state)


def _set(set_state: Callable[[Any], object], state: Any) -> None:
    set_state(state)


def keep_generators(stack: ExitStack) -> None:
    """Has random generators brought back, and nothing else."""
    drawing = _Drawing()
    stack.callback(_call_all, _generators(drawing.put_back))
    stack.enter_context(drawing)


def _generators(put_back: Callable[[Callable[[Any], object], Any], object]) -> list[Callable[[], object]]:
    callbacks: list[Callable[[], object]] = [
        partial(put_back, torch.set_rng_state, torch.get_rng_state()),
        partial(_put_back_changed, random.getstate, random.setstate, random.getstate()),
    ]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call, unused-ignore]
        callbacks.append(partial(put_back, torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        get_state, set_state = numpy.random.get_state, numpy.random.set_state
        callbacks.append(partial(_put_back_changed, get_state, set_state, get_state()))
    return callbacks


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
