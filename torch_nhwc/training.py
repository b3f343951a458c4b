"""Checks for what has lost the layout of a plan while a model trains, and calls that restore it."""

import zlib
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from torch_nhwc.converting.conversion import apply
from torch_nhwc.converting.report import Report
from torch_nhwc.converting.step_guard import set_step_guard
from torch_nhwc.layout import Format, Strides, has_strides, is_permuted
from torch_nhwc.nn.each_forward import is_in_each_forward
from torch_nhwc.ops import Storage, set_strides_
from torch_nhwc.planning.companions import Weight, find_companions, find_mismatched, held_by, sources_of
from torch_nhwc.planning.deciding import decide
from torch_nhwc.planning.matching import match, match_layers
from torch_nhwc.planning.plans import Action, CompanionRow, Plan, PlanOrPath, plan_from
from torch_nhwc.planning.remarks import has_lost_input_hook
from torch_nhwc.sites import computed_weights, wrappers
from torch_nhwc.sites.reasons import CONTIGUOUS_ONLY, Reason
from torch_nhwc.sites.site import Found

__all__ = ["Deviation", "align_optimizer_", "check", "restore_", "set_step_guard"]

_MISSING = "without such a site"
_BROADCAST = (
    "as a broadcast between layouts leaves them: load torch_nhwc.checkpoint.contiguous_state_dict(checkpoint) instead "
    "of a channels-last one"
)
_KEEPS_BUCKETS = (
    "keeps its parameters in contiguous buckets, and a conversion is lost or gives wrong steps: use "
    "parameters_as_bucket_view=False, or convert by each_forward=True"
)


@dataclass(frozen=True)
class Deviation:
    """A tensor whose layout is not the plan's, another part of a model that differs, or a difference between ranks.

    Example:
        >>> print(torch_nhwc.training.Deviation("weight", "grad", (27, 9, 3, 1), (27, 1, 9, 3)))
        grad of 'weight' has strides (27, 9, 3, 1), expected (27, 1, 9, 3)
    """

    site: str
    """The full name of the weight, or the path of the layer; empty for the model itself and for an optimizer."""
    what: str
    """`weight`, `grad`, `ema`, the optimizer's name for its state, `layer` for a layer that is no longer replaced,
    `input_hook` for a model that has lost the hook for its inputs, `plan` for ranks with different plans, or the class
    of an optimizer that gives wrong steps."""
    strides: Strides | None = None
    expected: Strides | None = None
    rank: int | None = None
    """The rank in the process group; `None` without one."""
    remark: str | None = None
    """What differs, if it is not the strides of a tensor."""

    def __str__(self) -> str:
        if self.what in ("weight", "layer", "input_hook"):
            subject = repr(self.site) if self.site else "the model"
        else:
            subject = f"{self.what} of {self.site!r}" if self.site else repr(self.what)
        where = "" if self.rank is None else f"rank {self.rank}: "
        return f"{where}{subject} {self.remark or f'has strides {self.strides}, expected {self.expected}'}"


def check(
    model: nn.Module, plan: PlanOrPath, optimizer: Any = None, ema: Any = None, process_group: Any = None
) -> list[Deviation]:
    """List what does not have a plan's layout: weights, gradients, optimizer state, averaged copies, layers and hooks.

    Args:
        model: a model that the plan fits, in any dtype, or the result of DDP, `torch.compile` or `AveragedModel`.
        plan: `report.plan`, or the path of its file.
        optimizer: one, or several, whose state is checked. One that keeps its parameters in flat buckets is listed.
        ema: averaged copies to check, one or several, as `convert_` takes them.
        process_group: also compares plans and strides across the ranks of this group, and whether a weight has the
            values of another rank's in another order. All ranks call this, and all get the same list, or an error.

    Returns:
        An empty list if everything is in order, so that `assert not check(model, plan)` holds.

    Raises:
        TypeError: `plan` is not a plan; a ValueError with a process group.
        ValueError: the model differs from the plan, the optimizer is another model's, or this rank is not in the
            process group.

    Example:
        >>> layer = torch.nn.Conv2d(3, 8, 3)
        >>> plan = torch_nhwc.convert_(layer).plan
        >>> layer.weight.data = layer.weight.data.contiguous()
        >>> print(*torch_nhwc.check(layer, plan))
        'weight' has strides (27, 9, 3, 1), expected (27, 1, 9, 3)
    """
    if process_group is None:
        return _look(model, plan, optimizer, ema, has_ranks=False).deviations
    failure: Exception | None = None
    try:
        mine = _look(model, plan, optimizer, ema, has_ranks=True)
    except Exception as error:  # the other ranks wait for an answer
        failure, mine = error, _Rank(failure=str(error))
    ranks = _gather(mine, process_group)
    failures = [f"rank {index}: {rank.failure}" for index, rank in enumerate(ranks) if rank.failure is not None]
    if failures:
        raise ValueError(f"check: {'; '.join(failures)}") from failure
    return _compare(ranks)


def restore_(
    model: nn.Module, plan: PlanOrPath, optimizer: Any = None, ema: Any = None, storage: Storage = "detach"
) -> Report:
    """Restore the format of a plan in a model that has lost it.

    `load_state_dict(assign=True)`, `vector_to_parameters` and `.to()` lose it. Gradients follow, and so do optimizer
    state and averaged copies that are given. Layers of the plan that are no longer replaced are replaced again, and a
    lost hook for the model's inputs is registered again. Weights may have another dtype than in the plan. Parameters
    that are not in the plan stay as they are, such as the transposed weight of a linear layer: `align_optimizer_` gives
    their optimizer state the same strides.

    Args:
        model: a model that the plan fits.
        plan: the plan of the conversion, `report.plan`, or the path of its file.
        optimizer: one, or several, whose state follows.
        ema: averaged copies that follow, one or several, as `convert_` takes them.
        storage: as in `convert_weights_`; `"detach"` because `vector_to_parameters` leaves slices of one vector.

    Raises:
        ValueError: the model differs from the plan.

    Example:
        >>> layer = torch.nn.Conv2d(3, 8, 3)
        >>> plan = torch_nhwc.convert_(layer).plan
        >>> _ = layer.load_state_dict(torch.nn.Conv2d(3, 8, 3).state_dict(), assign=True)
        >>> _ = torch_nhwc.training.restore_(layer, plan)
        >>> layer.weight.stride()
        (27, 1, 9, 3)
    """
    plan = plan_from(plan)
    found = match(plan, model, any_dtype=True)
    return apply(decide(found, plan.options(storage), sources_of(optimizer, ema, model), plan))


def align_optimizer_(model: nn.Module, optimizer: Any) -> list[CompanionRow]:
    """Give gradients and optimizer state the strides of their parameters.

    Call this after `optimizer.load_state_dict` of a checkpoint that may have another layout. Where a parameter and its
    state differ, fused CPU optimizers give wrong updates, silently, and others are slow. All parameters are aligned,
    not only convolution weights.

    Returns:
        The gradients and states that got other strides; an empty list if everything was in order.

    Raises:
        ValueError: the optimizer holds none of the model's parameters.
        RuntimeError: a state cannot change; then nothing has changed.

    Example:
        >>> layer = torch.nn.Conv2d(3, 8, 3, bias=False)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        >>> layer.weight.grad = torch.zeros(8, 3, 3, 3).to(memory_format=torch.channels_last)
        >>> [row.label for row in torch_nhwc.training.align_optimizer_(layer, optimizer)]
        ['grad']
    """
    sources = sources_of(optimizer, None, model)
    sources.check_optimizers(model.parameters())
    named = dict(model.named_parameters())
    names = [name for name, each in named.items() if type(each) is nn.Parameter and each.layout is torch.strided]
    apart = find_mismatched([named[name] for name in names], sources.optimizers)
    strides = [named[names[index]].stride() for index, *_ in apart]
    outcomes = set_strides_([tensor for *_, tensor in apart], strides, storage="detach")
    return [CompanionRow(names[index], label, outcome, None) for (index, label, _), outcome in zip(apart, outcomes)]


@dataclass
class _Rank:
    """What a rank sends to the others."""

    failure: str | None = None
    planned: dict[str, str] = field(default_factory=dict)
    """For every site and layer, what it is and what the plan does to it."""
    strides: dict[str, Strides] = field(default_factory=dict)
    orders: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Checksums of a weight's values, in contiguous order and in that of channels-last."""
    deviations: list[Deviation] = field(default_factory=list)

    def add(self, site: str, what: str, remark: str) -> None:
        """Add a deviation that is not about strides."""
        self.deviations.append(Deviation(site, what, remark=remark))


def _look(model: nn.Module, given: PlanOrPath, optimizer: Any, ema: Any, has_ranks: bool) -> _Rank:
    """Check the model of this rank."""
    plan = plan_from(given)
    model = _unwrapped(model, plan)
    seen = _Rank()
    found = match(plan, model, any_dtype=True)
    weights = _look_at_weights(found, plan, seen, has_ranks)
    _look_at_layers(found, plan, seen)
    seen.planned[""] = f"for inputs in {plan.input_format or 'any format'}"
    if has_lost_input_hook(model, plan):
        remark = f"has lost its hook that converts inputs to {plan.input_format}: restore_ registers it again"
        seen.add("", "input_hook", remark)
    sources = sources_of(optimizer, ema, model)
    sources.check_optimizers((*model.parameters(), *(weight.tensor for weight in weights)))
    permuted = {
        id(each.tensor)
        for each in weights
        if each.tensor.requires_grad and is_permuted(each.tensor.shape, each.strides)
    }
    for each in sources.optimizers:
        if wrappers.keeps_buckets(each) and not permuted.isdisjoint(held_by(each)):
            seen.add("", type(each).__name__, _KEEPS_BUCKETS)
    for companion in find_companions(weights, sources):
        expected = companion.weight.strides  # the plan's, which the weight may have lost
        if companion.reason is None and not has_strides(companion.tensor, expected):
            own = companion.tensor.stride()
            seen.deviations.append(Deviation(companion.weight.name, companion.label, own, expected))
    return seen


def _look_at_weights(found: Found, plan: Plan, seen: _Rank, has_ranks: bool) -> list[Weight]:
    """Check the plan's weights, and return those that are to be in the format."""
    weights = []
    wanted = Format(plan.memory_format)
    for row, site in zip(plan.rows, found.sites):
        name, tensor = row.full_name, site.tensor
        if row.is_in_each_forward:
            seen.planned[name] = f"{row.shape} of {row.dtype}, converted in each forward"
            if not is_in_each_forward(type(site.module)):
                seen.add(row.path, "layer", f"is a {row.layer} again, and does not convert its weight in each forward")
            continue
        seen.planned[name] = f"{row.shape} of {row.dtype} to strides {row.target_strides}"
        if tensor is None:
            continue
        own = seen.strides[name] = tensor.stride()
        if row.action is Action.REFUSE or not row.is_wanted:
            continue
        # The row's strides may be missing, if the layer was lazy, or be those of an older version of this package.
        expected = site.format(wanted).strides(tensor.shape)
        weights.append(Weight(name, tensor, expected))
        if has_ranks and type(tensor) is nn.Parameter and tensor.numel() and not tensor.is_meta:
            seen.orders[name] = _orders(tensor)
        if site.reason in CONTIGUOUS_ONLY and wanted.is_channels_last:
            seen.add(name, "weight", f"has a reason against its format: {site.reason.value}")
        if own != expected:
            seen.deviations.append(Deviation(name, "weight", own, expected))
        if row.reason is Reason.COPIED_EACH_FORWARD and computed_weights.step_format(site.module) is None:
            seen.add(name, "weight", "has lost the step that copies it into the memory format before each forward")
    return weights


def _look_at_layers(found: Found, plan: Plan, seen: _Rank) -> None:
    layers = {layer.path: layer for layer in match_layers(plan, found)}
    for row in plan.layers:
        seen.planned[row.path] = f"{row.layer}, {'replaced' if row.is_wanted else 'kept'}"
        layer = layers.get(row.path)
        if row.is_wanted and layer is not None and layer.reason is not Reason.REPLACED:
            seen.add(row.path, "layer", f"is a {layer.kind} again, and no longer {layer.gains}")


def _unwrapped(model: nn.Module, plan: Plan) -> nn.Module:
    """Return the model inside of its wrappers, without those that the plan names."""
    while wrapped := wrappers.inside(model):
        name, inside = wrapped
        if any(row.full_name.startswith(f"{name}.") for row in plan.rows):
            break
        model = inside
    return model


def _orders(tensor: Tensor) -> tuple[int, int]:
    """Return checksums of a weight's first filter, in contiguous order and in that of channels-last."""
    first = tensor.detach()[0]
    orders = [first.contiguous().flatten(), first.movedim(0, -1).contiguous().flatten()]
    contiguous, channels_last = (zlib.crc32(bytes(order.view(torch.uint8).tolist())) for order in orders)
    return contiguous, channels_last


def _gather(mine: _Rank, process_group: Any) -> list[_Rank]:
    """Return what every rank of a group has seen, in their order."""
    if torch.distributed.get_rank(process_group) < 0:
        raise ValueError("this rank is not in the process group")
    everyone: list[Any] = [None] * torch.distributed.get_world_size(process_group)
    torch.distributed.all_gather_object(everyone, mine, group=process_group)
    return everyone


def _compare(ranks: list[_Rank]) -> list[Deviation]:
    """Return the deviations of all ranks, and the differences from what most ranks have planned."""
    plans = [tuple(rank.planned.items()) for rank in ranks]
    first = plans.index(Counter(plans).most_common(1)[0][0])
    usual = ranks[first]
    found: list[Deviation] = []
    for index, rank in enumerate(ranks):
        found += [replace(each, rank=index) for each in rank.deviations]
        named = {each.site for each in (*rank.deviations, *usual.deviations)}
        for name in dict.fromkeys([*usual.planned, *rank.planned]):
            own, other = rank.planned.get(name), usual.planned.get(name)
            strides, expected = rank.strides.get(name), usual.strides.get(name)
            if own != other:
                remark = f"is {own or _MISSING}, on rank {first} {other or _MISSING}"
                found.append(Deviation(name, "plan", strides, expected, index, remark))
            elif strides != expected and name not in named:
                found.append(Deviation(name, "weight", strides, expected, index))
        for name, (contiguous, channels_last) in rank.orders.items():
            others = usual.orders.get(name, (contiguous, channels_last))
            if contiguous != others[0] and (contiguous == others[1] or channels_last == others[0]):
                remark = f"has the values of rank {first} in another order, {_BROADCAST}"
                found.append(Deviation(name, "weight", rank=index, remark=remark))
    return found
