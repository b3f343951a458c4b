"""Whether a model is laid out as its plan has it, on every rank."""

from collections import Counter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from torch_nhwc.each_forward.exchange import is_in_each_forward
from torch_nhwc.formats import Format, Strides
from torch_nhwc.memory import lies_as
from torch_nhwc.modules import computed, wrapping
from torch_nhwc.planning.companions import Weight, find_companions, sources_of
from torch_nhwc.planning.matching import match, match_layers
from torch_nhwc.planning.plans import Plan, expect_plan
from torch_nhwc.planning.rows import Action
from torch_nhwc.reasons import Reason

_T = TypeVar("_T")
_MISSING = "without such a site"


class Deviation(NamedTuple):
    """A deviation is a tensor that is not laid out as the plan has it, or a weight that ranks have planned differently.

    Example:
        >>> print(torch_nhwc.Deviation("weight", "grad", (27, 9, 3, 1), (27, 1, 9, 3), rank=None))
        grad of 'weight' has strides (27, 9, 3, 1), expected (27, 1, 9, 3)
    """

    site: str
    """The full name of the weight, or the path of the layer."""
    what: str
    """`weight`, `grad`, `ema`, the optimizer's name for its state, `layer` for one that is no longer exchanged, or
    `plan` where ranks have different ones."""
    strides: Strides | None
    wanted: Strides | None
    rank: int | None
    """In the process group; `None` without one."""
    remark: str | None = None
    """What differs where it is not the strides of a tensor."""

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        what = repr(self.site) if self.what in ("weight", "layer") else f"{self.what} of {self.site!r}"
        return f"{where}{what} {self.remark or f'has strides {self.strides}, expected {self.wanted}'}"


def check(
    model: nn.Module, plan: Plan, optimizer: Any = None, ema: Any = None, process_group: Any = None
) -> list[Deviation]:
    """Lists what is not, or no longer, laid out as a plan has it: weights, gradients, optimizer state, averaged copies.

    Args:
        model: one that the plan fits, in any dtype; or what DDP, `torch.compile` or `AveragedModel` has made of it.
        plan: `report.plan`.
        optimizer: one, or several, whose state is looked at.
        ema: averaged copies to look at, one or several, as `convert_` takes them.
        process_group: compares plans and strides across the ranks of this group as well. All of them call this, and
            all get the same list, or the same error.

    Returns:
        Empty where all is in order, so that `assert not check(model, plan)` holds.

    Raises:
        TypeError: `plan` is not a plan; a ValueError with a process group.
        ValueError: the model differs from the plan; the optimizer is another model's; or this rank is not in the
            process group.

    Example:
        >>> layer = torch.nn.Conv2d(3, 8, 3)
        >>> plan = torch_nhwc.convert_(layer).plan
        >>> layer.weight.data = layer.weight.data.contiguous()
        >>> print(*torch_nhwc.check(layer, plan))
        'weight' has strides (27, 9, 3, 1), expected (27, 1, 9, 3)
    """
    if process_group is None:
        return _look(model, plan, optimizer, ema).deviations
    failure: Exception | None = None
    try:
        mine = _look(model, plan, optimizer, ema)
    except Exception as error:  # whatever it is, the other ranks are waiting for an answer
        failure, mine = error, _Rank(str(error), {}, {}, [])
    ranks = _gather(mine, process_group)
    failures = [f"rank {index}: {rank.failure}" for index, rank in enumerate(ranks) if rank.failure is not None]
    if failures:
        raise ValueError(f"check: {'; '.join(failures)}") from failure
    return _compare(ranks)


class _Rank(NamedTuple):
    """What a rank tells the others."""

    failure: str | None
    planned: dict[str, str]
    """What every site and layer is, and is to be."""
    strides: dict[str, Strides]
    """As they are."""
    deviations: list[Deviation]


def _gather(mine: _T, process_group: Any) -> list[_T]:
    """What every rank of a group has, in their order."""
    if torch.distributed.get_rank(process_group) < 0:
        raise ValueError("this rank is not in the process group")
    everyone: list[Any] = [None] * torch.distributed.get_world_size(process_group)
    torch.distributed.all_gather_object(everyone, mine, group=process_group)
    return everyone


def _look(model: nn.Module, plan: Plan, optimizer: Any, ema: Any) -> _Rank:
    """This rank alone."""
    model = _unwrapped(model, expect_plan(plan))
    seen = _Rank(None, {}, {}, [])
    weights = []
    for row, site in zip(plan.rows, match(plan, model, any_dtype=True).sites):
        name, tensor = row.full_name, site.tensor
        seen.planned[name] = f"{row.shape} of {row.dtype} to strides {row.target_strides}"
        if row.is_in_each_forward:
            seen.planned[name] = f"{row.shape} of {row.dtype}, converted in each forward"
            if not is_in_each_forward(type(site.module)):
                remark = f"is a {row.layer} again, and does not convert its weight in each forward"
                seen.deviations.append(Deviation(row.path, "layer", None, None, None, remark))
            continue
        if tensor is None:
            continue
        own = seen.strides[name] = tensor.stride()
        if row.action is Action.REFUSE or not row.is_wanted:
            continue
        # A layer that was lazy when it was planned has a shape by now.
        wanted = row.target_strides or Format(plan.memory_format).strides(tensor.shape)
        weights.append(Weight(name, tensor, wanted))
        if own != wanted:
            seen.deviations.append(Deviation(name, "weight", own, wanted, None))
        if row.reason is Reason.COPIED_EACH_FORWARD and computed.step_format(site.module) is None:
            remark = "has lost the step that copies it into the memory format before each forward"
            seen.deviations.append(Deviation(name, "weight", own, wanted, None, remark))
    layers = {layer.path: layer for layer in match_layers(plan, model)}
    for layer_row in plan.layers:
        seen.planned[layer_row.path] = f"{layer_row.layer}, {'exchanged' if layer_row.is_wanted else 'kept'}"
        layer = layers.get(layer_row.path)
        if layer_row.is_wanted and layer is not None and layer.reason is not Reason.EXCHANGED:
            remark = f"is a {layer.kind} again, and loses {layer.loses}"
            seen.deviations.append(Deviation(layer_row.path, "layer", None, None, None, remark))
    sources = sources_of(optimizer, ema)
    sources.check_optimizers(model, (weight.tensor for weight in weights))
    for companion in find_companions(weights, sources):
        weight, tensor = companion.weight, companion.tensor
        # PyTorch itself leaves gradients and state with other strides in dimensions of size 1: nothing lies elsewhere.
        if companion.reason is None and not lies_as(tensor, weight.strides):
            seen.deviations.append(Deviation(weight.name, companion.label, tensor.stride(), weight.strides, None))
    return seen


def _unwrapped(model: nn.Module, plan: Plan) -> nn.Module:
    """The model inside of its wrappers, as far as the plan does not name them."""
    while wrapped := wrapping.inside(model):
        name, inside = wrapped
        if any(row.full_name.startswith(f"{name}.") for row in plan.rows):
            break
        model = inside
    return model


def _compare(ranks: list[_Rank]) -> list[Deviation]:
    """The deviations of all ranks, and what differs from most of them although it fits the rank's own plan."""
    plans = [tuple(rank.planned.items()) for rank in ranks]
    first = plans.index(Counter(plans).most_common(1)[0][0])
    usual = ranks[first]
    found: list[Deviation] = []
    for index, rank in enumerate(ranks):
        found += [each._replace(rank=index) for each in rank.deviations]
        named = {each.site for each in (*rank.deviations, *usual.deviations)}
        for name in dict.fromkeys([*usual.planned, *rank.planned]):
            own, other = rank.planned.get(name), usual.planned.get(name)
            strides, expected = rank.strides.get(name), usual.strides.get(name)
            if own != other:
                remark = f"is {own or _MISSING}, on rank {first} {other or _MISSING}"
                found.append(Deviation(name, "plan", strides, expected, index, remark))
            elif strides != expected and name not in named:
                found.append(Deviation(name, "weight", strides, expected, index))
    return found
