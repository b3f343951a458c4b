"""The verbs `convert_` and `channels_last`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from torch_nhwc.converting.applying import apply
from torch_nhwc.converting.report import Report
from torch_nhwc.ops import Storage
from torch_nhwc.planning.companions import sources_of
from torch_nhwc.planning.deciding import decide
from torch_nhwc.planning.matching import match
from torch_nhwc.planning.options import FilterFunction, Options
from torch_nhwc.planning.plans import Plan
from torch_nhwc.sites.finding import find


def convert_(
    model: nn.Module,
    memory_format: torch.memory_format | str | None = None,
    *,
    optimizer: Any = None,
    ema: Any = None,
    filter_fn: FilterFunction | None = None,
    plan: Plan | None = None,
    example_inputs: Any = None,
    storage: Storage | None = None,
    strict: bool = False,
    input_format: Literal["channels_last", "channels_last_3d"] | torch.memory_format | None = None,
    preserve: bool = False,
    each_forward: bool = False,
) -> Report:
    """Convert the convolution weights of a model to a memory format, in place, with all that belongs to them.

    Parameters stay the same objects; gradients follow, and so do the optimizer state and averaged copies that are
    given. All or nothing: after an exception the model is as it was. A second call does nothing.

    Args:
        model: Any module, TorchScript modules included, or one layer. Convert before wrapping and compiling it.
        memory_format: `None` is channels-last by the weights' rank. `torch.channels_last` means 2D weights,
            `torch.channels_last_3d` 3D ones, `torch.contiguous_format` both. Their names mean the same.
        optimizer: One or several, whose state follows, also after `load_state_dict`; `()` if there is none.
        ema: Averaged copies: a copy of the model, `AveragedModel`, or a mapping of full names to tensors; or several.
        filter_fn: Called as `filter_fn(module, path)`; if it returns false, the layer stays as it is.
        plan: A plan to apply. It has its own memory format, filter and example inputs.
        example_inputs: A tensor, a tuple of positional arguments, or a dict of keyword arguments, on which the model
            runs once, to see which tensors reach its convolutions.
        storage: `"auto"`, `"fresh"`, `"reuse"` or `"detach"`, as in `convert_weights_`. The default is `"auto"`.
        strict: Whether to raise, before anything changes, if a weight is refused or there is none to convert.
        input_format: `"channels_last"` also converts the model's inputs, by a forward pre-hook; those of a rank that
            its convolutions have. `"channels_last_3d"` means volumes only.
        preserve: Whether layers that lose channels-last are replaced by ones that keep it: their class changes.
        each_forward: Whether weights stay as they are, and layers convert them in each forward: for parameters that
            have to be contiguous, before or after wrapping.

    Returns:
        What was done to every weight, and why; its `revert` undoes it.

    Raises:
        ValueError, TypeError: An argument is not valid, or the model differs from the plan.
        RuntimeError: `strict`; or the operators refuse a tensor, and their error says why.

    Warns:
        UserWarning: Weights are refused or leave shared memory, there is none to convert, or weights that move have
            gradients and `optimizer` is `None`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv3d(3, 8, 3))
        >>> report = torch_nhwc.convert_(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        >>> model[0].weight.stride(), model[1].weight.stride()
        ((27, 1, 9, 3), (81, 1, 27, 9, 3))
    """
    start = time.perf_counter()
    if plan is None:
        options = Options.of(memory_format, storage, filter_fn, input_format, preserve, each_forward)
        found = find(model, example_inputs)
    elif any(each is not None for each in (memory_format, filter_fn, example_inputs)) or preserve or each_forward:
        raise ValueError(
            "a plan has its own memory format, filter and example inputs, and says which layers to replace, and what "
            "to convert in each forward: pass the one or the others"
        )
    else:
        found = match(plan, model)
        options = plan.options(storage, input_format)
    return apply(decide(found, options, sources_of(optimizer, ema, model), plan), strict, start)


@contextmanager
def channels_last(model: nn.Module, **options: Any) -> Iterator[Report]:
    """Convert a model by `convert_(model, **options)`, and revert it at the end, after exceptions too.

    The state of an optimizer that is made inside of the context follows by `report.revert(optimizer)`.

    Example:
        >>> layer = torch.nn.Conv2d(3, 8, 3)
        >>> with torch_nhwc.channels_last(layer):
        ...     layer.weight.stride()
        (27, 1, 9, 3)
        >>> layer.weight.stride()
        (27, 9, 3, 1)
    """
    report = convert_(model, **options)
    try:
        yield report
    finally:
        report.revert()
