"""Run a model so that nothing of the run remains."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torch_nhwc.running.calling import call


def run_once(model: nn.Module, inputs: Any, *contexts: AbstractContextManager[Any]) -> Any:
    """Run a model without gradients, in its own mode, and return its output; see `preserved_state`.

    Compiled modules run uncompiled.

    Args:
        model: The model to run.
        inputs: A tensor, a tuple of positional arguments, or a dict of keyword arguments.
        contexts: Context managers that are entered around the call alone.

    Raises:
        TypeError: A shape was given instead of tensors.
    """
    with ExitStack() as stack:
        stack.enter_context(preserved_state(model))
        stack.enter_context(torch.no_grad())
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and importing it takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for context in contexts:
            stack.enter_context(context)
        return call(model, inputs)


@contextmanager
def preserved_state(*models: nn.Module) -> Iterator[None]:
    """Restore the models' buffers and training modes, and the random generators, at the end of the block.

    The generators are PyTorch's, Python's and NumPy's. A process has one of each for all threads: numbers that other
    threads draw meanwhile are drawn again. Autocast's cache of casted weights is cleared before and after the block.
    """
    restoring = _generators()
    for model in models:
        restoring += [partial(setattr, *mode) for mode in _training_modes(model)]
        for module in model.modules():
            restoring += _buffers(module)
    torch.clear_autocast_cache()  # a weight that was cast without a gradient must not be used with one, nor conversely
    try:
        yield
    finally:
        torch.clear_autocast_cache()
        for restore in restoring:
            restore()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode, and every module back into its own mode at the end of the block."""
    modes = _training_modes(model)
    try:
        if modes:
            model.eval()
        yield
    finally:
        for mode in modes:
            setattr(*mode)


def _training_modes(model: nn.Module) -> list[tuple[nn.Module, str, bool]]:
    # A frozen TorchScript module has no mode.
    return [(module, "training", module.training) for module in model.modules() if hasattr(module, "training")]


def _generators() -> list[Callable[[], object]]:
    """Return functions that restore the random generators."""
    restoring: list[Callable[[], object]] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(random.setstate, random.getstate()),
    ]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call, unused-ignore]
        restoring.append(partial(torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        restoring.append(partial(numpy.random.set_state, numpy.random.get_state()))
    return restoring


def _buffers(module: nn.Module) -> list[Callable[[], object]]:
    """Return functions that restore the buffers of one module: which there are, and their values."""
    is_scripted = isinstance(module, torch.jit.ScriptModule)
    names = [] if is_scripted else [partial(_restore_names, module._buffers, dict(module._buffers))]
    buffers = module.buffers(recurse=False)
    return [*names, *(partial(_restore_values, buffer, buffer.detach().clone()) for buffer in buffers)]


def _restore_names(buffers: dict[str, Tensor | None], before: dict[str, Tensor | None]) -> None:
    buffers.clear()
    buffers.update(before)


def _restore_values(buffer: Tensor, values: Tensor) -> None:
    if buffer.shape != values.shape:  # observers of quantization resize their buffers
        buffer.resize_(values.shape)
    has_values = not buffer.is_meta and not hasattr(buffer, "fake_mode")
    if has_values and not torch.equal(buffer, values):  # writing would make graphs that saved the buffer useless
        buffer.detach().copy_(values)
