"""Whether a model is laid out as its plan has it, on every rank."""

from collections import Counter
from typing import Any, NamedTuple

from torch import nn

from torch_nhwc import computed
from torch_nhwc.checkpoints import lies_as
from torch_nhwc.companions import find_companions, followers_of
from torch_nhwc.distributed import gather
from torch_nhwc.planning import Action, Plan, PlanRow, Strides, canonical_strides, match
from torch_nhwc.reasons import Reason
from torch_nhwc.report import expect_plan
from torch_nhwc.sites import Site


class Deviation(NamedTuple):
    """A tensor that is not laid out as the plan has it, or a site that ranks have planned differently."""

    site: str
    """The full name of the weight."""
    what: str
    """`weight`, `grad`, `ema`, the optimizer's name for its state, or `plan` where ranks have different ones."""
    strides: Strides | None
    wanted: Strides | None
    rank: int | None
    """In the process group; `None` without one."""
    remark: str | None = None
    """What differs where it is not the strides of a tensor."""

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        what = repr(self.site) if self.what == "weight" else f"{self.what} of {self.site!r}"
        return f"{where}{what} {self.remark or f'has strides {self.strides}, expected {self.wanted}'}"


def check(
    model: nn.Module, plan: Plan, optimizer: Any = None, ema: Any = None, process_group: Any = None
) -> list[Deviation]:
    """What is not, or no longer, laid out as a plan has it: weights, gradients, optimizer state and averaged copies.

    Args:
        model: one that the plan fits, in any dtype; or what DDP, `torch.compile` or `AveragedModel` has made of it.
        plan: `report.plan`.
        optimizer: as in `convert_`.
        ema: as in `convert_`.
        process_group: compares plans and strides across the ranks of this group as well. All of them call this, and
            all get the same list, or the same error.

    Returns:
        Empty where all is in order, so that `assert not check(model, plan)` holds.

    Raises:
        TypeError: `plan` is not a plan; a ValueError with a process group.
        ValueError: the model differs from the plan; the optimizer is another model's; or this rank is not in the
            process group.
    """
    if process_group is None:
        return _look(model, plan, optimizer, ema).deviations
    failure: Exception | None = None
    try:
        mine = _look(model, plan, optimizer, ema)
    except Exception as error:  # whatever it is, the other ranks are waiting for an answer
        failure, mine = error, _Rank(str(error), {}, {}, [])
    ranks = gather(mine, process_group)
    failures = [f"rank {index}: {rank.failure}" for index, rank in enumerate(ranks) if rank.failure is not None]
    if failures:
        raise ValueError(f"check: {'; '.join(failures)}") from failure
    return _compare(ranks)


class _Rank(NamedTuple):
    """What a rank tells the others."""

    failure: str | None
    planned: dict[str, tuple[object, ...]]
    """Shape, dtype and target strides of every site."""
    strides: dict[str, Strides]
    """As they are."""
    deviations: list[Deviation]


def _look(model: nn.Module, plan: Plan, optimizer: Any, ema: Any) -> _Rank:
    """This rank alone."""
    expect_plan(plan)
    model = _unwrapped(model, plan)
    found = _Rank(None, {}, {}, [])
    wanted: dict[int, Strides] = {}
    weights = []
    for index, (row, site) in enumerate(zip(plan.rows, match(plan, model, any_dtype=True))):
        name, tensor = row.full_name, site.tensor
        found.planned[name] = row.shape, row.dtype, row.target_strides
        if tensor is None:
            continue
        found.strides[name] = tensor.stride()
        strides = _wanted_strides(row, site, plan.memory_format)
        if strides is None:
            continue
        wanted[index] = strides
        weights.append((index, name, tensor))
        if tensor.stride() != strides:
            found.deviations.append(Deviation(name, "weight", tensor.stride(), strides, None))
        if row.reason is Reason.COPIED_EACH_FORWARD and computed.step_format(site.module) is None:
            remark = "has lost the step that copies it into the memory format before each forward"
            found.deviations.append(Deviation(name, "weight", tensor.stride(), strides, None, remark))
    followers = followers_of(optimizer, ema)
    followers.check_optimizers(model, (tensor for _, _, tensor in weights))
    for companion in find_companions(weights, followers):
        tensor, strides = companion.tensor, wanted[companion.row]
        # PyTorch itself leaves gradients and state with other strides in dimensions of size 1: nothing lies elsewhere.
        if companion.reason is None and not lies_as(tensor, strides):
            name = plan.rows[companion.row].full_name
            found.deviations.append(Deviation(name, companion.label, tensor.stride(), strides, None))
    return found


# Where wrappers keep the model.
_INSIDE = dict.fromkeys(("DistributedDataParallel", "DataParallel", "AveragedModel"), "module")
_INSIDE["OptimizedModule"] = "_orig_mod"


def _unwrapped(model: nn.Module, plan: Plan) -> nn.Module:
    while name := _INSIDE.get(type(model).__name__):
        if any(row.full_name.startswith(f"{name}.") for row in plan.rows):  # a plan of the wrapper
            break
        model = getattr(model, name)
    return model


def _wanted_strides(row: PlanRow, site: Site, memory_format: str | None) -> Strides | None:
    if row.action is Action.REFUSE or not row.is_wanted or site.tensor is None:
        return None
    # A layer that was lazy when it was planned has a shape by now.
    return row.target_strides or canonical_strides(site.tensor.shape, memory_format != "contiguous_format")


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
                remark = f"is {_described(own)}, on rank {first} {_described(other)}"
                found.append(Deviation(name, "plan", strides, expected, index, remark))
            elif strides != expected and name not in named:
                found.append(Deviation(name, "weight", strides, expected, index))
    return found


def _described(planned: tuple[object, ...] | None) -> str:
    if planned is None:
        return "without such a site"
    shape, dtype, strides = planned
    return f"{shape} of {dtype} to strides {strides}"
