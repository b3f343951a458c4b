"""Whether a model is laid out as its plan has it, on every rank."""

import zlib
from collections import Counter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from torch_nhwc.each_forward.exchange import is_in_each_forward
from torch_nhwc.formats import Format, Strides, is_permuted
from torch_nhwc.memory import lies_as
from torch_nhwc.modules import computed, optimizers, wrapping
from torch_nhwc.modules.gradient_buckets import hooks_that_permute
from torch_nhwc.planning.companions import Weight, find_companions, held_by, sources_of
from torch_nhwc.planning.entry import lost_entries
from torch_nhwc.planning.matching import match, match_layers
from torch_nhwc.planning.plans import Plan, expect_plan
from torch_nhwc.planning.rows import Action
from torch_nhwc.reasons import CONTIGUOUS_ONLY, Reason

_T = TypeVar("_T")
_MISSING = "without such a site"
_BROADCAST = (
    "as a broadcast between layouts leaves them: load contiguous_state_dict(checkpoint) instead of a channels-last one"
)
_READS_GRADIENTS = (
    "reads bucket.gradients(), where channels-last gradients are permuted: use bucket.buffer(), or convert by "
    "each_forward=True"
)
_KEEPS_BUCKETS = (
    "keeps its parameters in contiguous buckets, and a conversion is lost or gives wrong steps: use "
    "parameters_as_bucket_view=False, or convert by each_forward=True"
)


class Deviation(NamedTuple):
    """A deviation is a tensor that is not laid out as the plan has it, or a weight that ranks have planned differently.

    Example:
        >>> print(torch_nhwc.Deviation("weight", "grad", (27, 9, 3, 1), (27, 1, 9, 3), rank=None))
        grad of 'weight' has strides (27, 9, 3, 1), expected (27, 1, 9, 3)
    """

    site: str
    """The full name of the weight, or the path of the layer; empty for what is around the model."""
    what: str
    """`weight`, `grad`, `ema`, the optimizer's name for its state, `layer` for one that is no longer exchanged, `entry`
    for a module that has lost the hook for its inputs, `plan` where ranks have different ones, or the name of a
    communication hook or an optimizer that reads weights wrongly."""
    strides: Strides | None
    wanted: Strides | None
    rank: int | None
    """In the process group; `None` without one."""
    remark: str | None = None
    """What differs where it is not the strides of a tensor."""

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        around = f"{self.what} of {self.site!r}" if self.site else repr(self.what)
        what = (
            around if self.what not in ("weight", "layer", "entry") else repr(self.site) if self.site else "the model"
        )
        return f"{where}{what} {self.remark or f'has strides {self.strides}, expected {self.wanted}'}"


def check(
    model: nn.Module, plan: Plan, optimizer: Any = None, ema: Any = None, process_group: Any = None
) -> list[Deviation]:
    """Lists what is not, or no longer, laid out as a plan has it: weights, gradients, optimizer state, averaged copies.

    Args:
        model: one that the plan fits, in any dtype; or what DDP, `torch.compile` or `AveragedModel` has made of it. Of
            DDP's, communication hooks whose code reads `bucket.gradients()` are named as well.
        plan: `report.plan`.
        optimizer: one, or several, whose state is looked at. One that keeps its parameters in flat buckets is named.
        ema: averaged copies to look at, one or several, as `convert_` takes them.
        process_group: compares plans and strides across the ranks of this group as well, and whether a weight has the
            values of another rank's in another order. All of them call this, and all get the same list, or the same
            error.

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
        return _look(model, plan, optimizer, ema, is_alone=True).deviations
    failure: Exception | None = None
    try:
        mine = _look(model, plan, optimizer, ema, is_alone=False)
    except Exception as error:  # whatever it is, the other ranks are waiting for an answer
        failure, mine = error, _Rank(str(error), {}, {}, {}, [])
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
    orders: dict[str, tuple[int, int]]
    """What tells the values of a weight, in contiguous order and in that of channels-last."""
    deviations: list[Deviation]


def _gather(mine: _T, process_group: Any) -> list[_T]:
    """What every rank of a group has, in their order."""
    if torch.distributed.get_rank(process_group) < 0:
        raise ValueError("this rank is not in the process group")
    everyone: list[Any] = [None] * torch.distributed.get_world_size(process_group)
    torch.distributed.all_gather_object(everyone, mine, group=process_group)
    return everyone


def _look(model: nn.Module, plan: Plan, optimizer: Any, ema: Any, is_alone: bool) -> _Rank:
    """This rank alone."""
    model, hooks = _unwrapped(model, expect_plan(plan))
    seen = _Rank(None, {}, {}, {}, [])
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
        # Not the row's: a layer that was lazy when it was planned has a shape by now, and an older version of this
        # package has planned channels-last for filters of one channel.
        wanted = site.format(Format(plan.memory_format)).strides(tensor.shape)
        weights.append(Weight(name, tensor, wanted))
        if not is_alone and type(tensor) is nn.Parameter and tensor.numel() and not tensor.is_meta:
            seen.orders[name] = _orders(tensor)
        if site.reason in CONTIGUOUS_ONLY and Format(plan.memory_format).is_channels_last:
            remark = f"has a reason against its format: {site.reason.value}"
            seen.deviations.append(Deviation(name, "weight", own, wanted, None, remark))
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
    for path, memory_format in lost_entries(model, plan):
        remark = f"no longer brings its inputs into {memory_format}: convert_(model, plan=plan) puts the hook back"
        seen.deviations.append(Deviation(path, "entry", None, None, None, remark))
    sources = sources_of(optimizer, ema, model)
    sources.check_optimizers(model, (weight.tensor for weight in weights))
    trained = [weight for weight in weights if weight.tensor.requires_grad]
    permuted = {id(weight.tensor) for weight in trained if is_permuted(weight.tensor.shape, weight.strides)}
    if permuted:
        seen.deviations.extend(Deviation("", hook, None, None, None, _READS_GRADIENTS) for hook in hooks)
        for each in sources.optimizers:
            if optimizers.keeps_buckets(each) and not permuted.isdisjoint(held_by(each)):
                seen.deviations.append(Deviation("", type(each).__name__, None, None, None, _KEEPS_BUCKETS))
    for companion in find_companions(weights, sources):
        weight, tensor = companion.weight, companion.tensor
        # PyTorch itself leaves gradients and state with other strides in dimensions of size 1: nothing lies elsewhere.
        if companion.reason is None and not lies_as(tensor, weight.strides):
            seen.deviations.append(Deviation(weight.name, companion.label, tensor.stride(), weight.strides, None))
    return seen


def _orders(tensor: Tensor) -> tuple[int, int]:
    """Checksums of a weight's first filter, in contiguous order and in that of channels-last."""
    first = tensor.detach()[0]
    orders = [first.contiguous().flatten(), first.movedim(0, -1).contiguous().flatten()]
    contiguous, channels_last = (zlib.crc32(bytes(order.view(torch.uint8).tolist())) for order in orders)
    return contiguous, channels_last


def _unwrapped(model: nn.Module, plan: Plan) -> tuple[nn.Module, list[str]]:
    """The model inside of its wrappers, as far as the plan does not name them, and the wrappers' hooks that permute."""
    hooks = hooks_that_permute(model)
    while wrapped := wrapping.inside(model):
        name, inside = wrapped
        if any(row.full_name.startswith(f"{name}.") for row in plan.rows):
            break
        model = inside
        hooks += hooks_that_permute(model)
    return model, hooks


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
        for name, (contiguous, channels_last) in rank.orders.items():
            others = usual.orders.get(name, (contiguous, channels_last))
            if contiguous != others[0] and (contiguous == others[1] or channels_last == others[0]):
                remark = f"has the values of rank {first} in another order, {_BROADCAST}"
                found.append(Deviation(name, "weight", strides, expected, index, remark))
    return found
