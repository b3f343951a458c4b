"""The verb `plan`."""

from typing import Any, Literal

import torch
from torch import nn

from torch_nhwc.ops import Storage
from torch_nhwc.planning.companions import sources_of
from torch_nhwc.planning.deciding import decide
from torch_nhwc.planning.plans import FilterFunction, Options, Plan
from torch_nhwc.sites.finding import find


def plan(
    model: nn.Module,
    memory_format: torch.memory_format | str | None = None,
    *,
    optimizer: Any = None,
    ema: Any = None,
    filter_fn: FilterFunction | None = None,
    example_inputs: Any = None,
    storage: Storage | None = None,
    input_format: Literal["channels_last", "channels_last_3d"] | torch.memory_format | None = None,
    preserve: bool = True,
    each_forward: bool = False,
) -> Plan:
    """Plan what a conversion would do to every convolution weight of a model, without writing anything.

    `convert_` with the same arguments does what the plan says, and so does `convert_(model, plan=plan)`.

    Args:
        model: Any module, TorchScript modules included, or one layer.
        memory_format: As in `convert_`.
        optimizer: One or several, whose state would follow. A weight whose state cannot follow is refused.
        ema: One or several averaged copies that would follow.
        filter_fn: Called as `filter_fn(module, path)`; if it returns false, the layer is left out.
        example_inputs: A tensor, a tuple of positional arguments, or a dict of keyword arguments. The model runs once
            on them, under `no_grad` and in its own mode, and every parameter that reaches a convolution as its weight
            is a site, whatever the layer; buffers and random generators are restored afterwards.
        storage: As in `convert_weights_`; `None` is `"auto"`.
        input_format: As in `convert_`.
        preserve: As in `convert_`.
        each_forward: As in `convert_`.

    Raises:
        TypeError: `model` is not a module, or an argument has the wrong type.
        ValueError: An argument is not valid; `example_inputs` for a model with lazy layers; an optimizer or an averaged
            copy is that of another model.
        RuntimeError: `input_format` for a TorchScript module, which takes no hook.

    Example:
        >>> plan = torch_nhwc.plan(torch.nn.Conv2d(3, 8, 3))
        >>> plan.bytes_to_move
        864
    """
    options = Options.of(memory_format, storage, filter_fn, input_format, preserve, each_forward)
    found = find(model, example_inputs)
    return decide(found, options, sources_of(optimizer, ema, model), with_gradients=False).plan
