"""Bringing back what loading and other code took away: a plan's format, and the layout of optimizer state."""

from dataclasses import replace
from typing import Any

from torch import nn

from torch_nhwc.converting.conversion import carry_out, request_of
from torch_nhwc.converting.report import Report
from torch_nhwc.ops import lay_out_weights_
from torch_nhwc.outcomes import Storage
from torch_nhwc.planning.companions import CompanionRow, Weight, find_apart, is_plain, sources_of
from torch_nhwc.planning.matching import match
from torch_nhwc.planning.plans import Plan


def restore_(
    model: nn.Module, plan: Plan, optimizer: Any = None, ema: Any = None, storage: Storage = "detach"
) -> Report:
    """Brings the weights back into the format that a plan describes, where something took it away.

    `load_state_dict(assign=True)`, `vector_to_parameters` and `.to()` take it away. Gradients follow, and so do state
    and averaged copies that are given; layers of the plan that are no longer exchanged are so again. Weights may have
    another dtype than in the plan. What else was laid out anew, such as a transposed weight of a linear layer, is not
    the plan's: `align_` makes the optimizer's state fit.

    Args:
        model: one that the plan fits.
        plan: of the conversion, `report.plan`.
        optimizer: one, or several, whose state follows.
        ema: averaged copies that follow, one or several, as `convert_` takes them.
        storage: `"auto"`, `"fresh"`, `"reuse"` or `"detach"`, as `convert_weights_` explains them; `"detach"` because
            `vector_to_parameters` leaves slices of one vector.

    Raises:
        TypeError: `plan` is not a plan.
        ValueError: the model differs from the plan.

    Example:
        >>> layer = torch.nn.Conv2d(3, 8, 3)
        >>> plan = torch_nhwc.convert_(layer).plan
        >>> _ = layer.load_state_dict(torch.nn.Conv2d(3, 8, 3).state_dict(), assign=True)
        >>> _ = torch_nhwc.restore_(layer, plan)
        >>> layer.weight.stride()
        (27, 1, 9, 3)
    """
    found = match(plan, model, any_dtype=True)
    request = request_of(plan, storage)._replace(input_format=None, entries=())  # hooks are never lost by loading
    report = carry_out(found, request, sources_of(optimizer, ema, model), plan)
    return replace(report, plan=replace(plan, rows=report.plan.rows, layers=report.plan.layers))


def align_(model: nn.Module, optimizer: Any) -> list[CompanionRow]:
    """Lays gradients and optimizer state out as their parameters lie.

    To be called after `optimizer.load_state_dict` of a checkpoint that may be in another layout: fused CPU optimizers
    step silently wrong, and others slowly, where a parameter and its state differ. Every parameter is looked at, not
    only convolution weights.

    Args:
        model: what the optimizer optimizes.
        optimizer: one, or several.

    Returns:
        What was laid out anew; empty where all was in order.

    Raises:
        ValueError: the optimizer holds none of the model's parameters.
        RuntimeError: state that cannot change; nothing has changed then.

    Example:
        >>> layer = torch.nn.Conv2d(3, 8, 3, bias=False)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> layer.weight.grad = torch.zeros(8, 3, 3, 3).to(memory_format=torch.channels_last)
        >>> [row.label for row in torch_nhwc.align_(layer, optimizer)]
        ['grad']
    """
    sources = sources_of(optimizer, None, model)
    sources.check_optimizers(model)
    weights = [Weight(name, each, each.stride()) for name, each in model.named_parameters() if is_plain(each)]
    apart = find_apart(weights, sources)
    strides = [companion.weight.strides for companion in apart]
    outcomes = lay_out_weights_([companion.tensor for companion in apart], strides, storage="detach")
    return [
        CompanionRow(companion.weight.name, companion.label, outcome, None)
        for companion, outcome in zip(apart, outcomes)
    ]
