"""`plan`: the whole decision of a conversion, without writing anything."""

from typing import Any, Literal

import torch
from torch import nn
from torch.export import ExportedProgram

from torch_nhwc.finding.exported import module_for
from torch_nhwc.finding.find import find
from torch_nhwc.outcomes import Storage
from torch_nhwc.planning.companions import sources_of
from torch_nhwc.planning.deciding import Decision, decide
from torch_nhwc.planning.following import follow
from torch_nhwc.planning.layers import LayerDecision, decide_layers
from torch_nhwc.planning.plans import EachForward, Plan
from torch_nhwc.planning.request import FilterFunction, Request
from torch_nhwc.preserving.find import find_layers


def plan(
    model: nn.Module | ExportedProgram,
    memory_format: torch.memory_format | str | None = None,
    *,
    optimizer: Any = None,
    ema: Any = None,
    filter_fn: FilterFunction | None = None,
    example_inputs: Any = None,
    storage: Storage | None = None,
    input_format: Literal["channels_last", "channels_last_3d"] | torch.memory_format | None = None,
    preserve: bool = False,
    each_forward: EachForward = False,
) -> Plan:
    """Decides what a conversion would do to every convolution weight of a model, without writing anything.

    `convert_` with the same arguments does what the plan says, and so does `convert_(model, plan=plan)`.

    Args:
        model: any module, TorchScript modules included, one layer, or an exported program.
        memory_format: `None` is channels-last by the weights' rank, 2D and 3D in one call. `torch.channels_last` means
            the 2D weights, `torch.channels_last_3d` the 3D ones, `torch.contiguous_format` both. Their names, such as
            `"channels_last"`, mean the same.
        optimizer: one, or several, whose state would follow. A weight whose state cannot follow is refused.
        ema: averaged copies that would follow, one or several, as `convert_` takes them.
        filter_fn: called as `filter_fn(module, path)`; false keeps the layer as it is.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword ones. The model then runs once
            on them, under `no_grad` and in its own mode, and every parameter that reaches a convolution as its weight
            is a site, whatever the layer; buffers, and random generators that it draws from, are brought back
            afterwards.
        storage: `"auto"`, `"fresh"`, `"reuse"` or `"detach"`, as `convert_weights_` explains them; `None` is `"auto"`.
        input_format: `"channels_last"` where inputs are to be brought into channels-last at the model's entry,
            `"channels_last_3d"` for volumes alone.
        preserve: whether layers that lose on channels-last would be exchanged for such as keep it.
        each_forward: whether weights would stay as they are, and be converted in each forward, as `convert_` has it.

    Raises:
        TypeError: `model` is not a module, or a layer's weight is not a tensor; `filter_fn` cannot be called.
        ValueError: the memory format, `storage`, `input_format` or `each_forward` is none of these; lazy layers and
            example inputs together; `preserve` or `each_forward` with contiguous; an optimizer or an
            averaged copy is that of another model.
        RuntimeError: `input_format` for a TorchScript module, which takes no hook.

    Example:
        >>> plan = torch_nhwc.plan(torch.nn.Conv2d(3, 8, 3))
        >>> plan.bytes_to_move
        864
    """
    request = Request.of(memory_format, storage, filter_fn, input_format, preserve, each_forward)
    module = module_for(model, ema=ema, example_inputs=example_inputs, preserve=preserve, each_forward=each_forward)
    sources = sources_of(optimizer, ema, module)
    found = find(module, example_inputs)
    decisions = decide(found, request)
    layers = decide_layers(find_layers(module), request) if preserve else []
    # With gradients alone, which move as under "auto", the operators have seen already whether they can follow.
    if sources.optimizers or sources.copies or request.storage == "reuse" or request.input_format:
        follow(found, decisions, layers, sources, request)
    return plan_of(decisions, layers, request, found.observed)


def plan_of(decisions: list[Decision], layers: list[LayerDecision], request: Request, observed: bool) -> Plan:
    """The plan that decisions amount to."""
    rows = tuple(decision.row for decision in decisions)
    of_layers = tuple(decision.row for decision in layers)
    formats = request.format.name, request.storage, request.input_format
    return Plan(rows, *formats, of_layers, request.each_forward, request.entries, observed)
