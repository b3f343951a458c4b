"""`trace`: a model under observation."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn

from torch_nhwc.finding.find import instead_of
from torch_nhwc.modules.walk import walk
from torch_nhwc.tracing.advice import Adviser
from torch_nhwc.tracing.record import Trace
from torch_nhwc.tracing.recording import Recorder
from torch_nhwc.tracing.reorders import watch_reorders
from torch_nhwc.tracing.rows import Unseen
from torch_nhwc.tracing.tallies import Tallies

_SCRIPTED = "a TorchScript module, whose operators show without the modules inside of it"


@contextmanager
def trace(model: nn.Module, *, reorders: bool = False) -> Iterator[Trace]:
    """Sees where a model loses channels-last, while it runs in the block: a context that gives a `Trace`.

    Every operator counts that runs in the block, forward and backward, with the module that called it; in other
    threads, those inside of the model and their backward. Nothing of the model changes. What runs takes longer, by some
    tens of microseconds for each operator.

    Args:
        model: a module; its inner modules are told by their paths in it.
        reorders: also ask oneDNN, or the profiler of a GPU, what is reordered inside of operators.

    Raises:
        TypeError: it is no module.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv3d(3, 8, 3), torch.nn.AvgPool3d(2))
        >>> with torch_nhwc.channels_last(model), torch_nhwc.trace(model) as trace:
        ...     model(torch.randn(2, 3, 8, 8, 8)).sum().backward()
        >>> [(loss.path, loss.operator, loss.phase) for loss in trace.losses]
        [('1', 'aten::avg_pool3d', 'forward')]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"trace: expected a torch.nn.Module, got {type(model).__name__}{instead_of(model)}")
    tallies = Tallies()
    recorder = Recorder(model, _paths(model, tallies), tallies, Adviser(model))
    is_on_gpu = any(tensor.is_cuda for tensor in chain(model.parameters(), model.buffers()))
    with recorder.watch(watch_reorders(tallies, is_on_gpu) if reorders else None):
        yield Trace(tallies)


def _paths(model: nn.Module, tallies: Tallies) -> dict[int, str]:
    """By id, the path of each module; one that hides those inside of it is told."""
    paths = {}
    for path, module, _ in walk(model):
        paths[id(module)] = path
        if isinstance(module, torch.jit.ScriptModule):
            tallies.add(Unseen(path, _SCRIPTED))
    return paths
