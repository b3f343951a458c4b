"""What a search finds beyond the fixed policies: weights that are better left contiguous, and islands of a format."""

import math
from collections.abc import Mapping
from contextlib import ExitStack

import torch
from torch import nn

from torch_nhwc.formats import CONTIGUOUS
from torch_nhwc.planning.plans import Plan
from torch_nhwc.planning.rows import Action
from torch_nhwc.running.rehearsal import restore_afterwards
from torch_nhwc.tuning.islands import Islands
from torch_nhwc.tuning.units import seconds_of_units, units_of
from torch_nhwc.tuning.variants import sharing, with_entries, without
from torch_nhwc.tuning.workload import Workload

SITES = "sites"
ISLANDS = "islands"
# What the search takes, in calls of the model, about.
CALLS = 16

_PASSES = 3
# What a contiguous weight has to gain for its site to be tried: the race times the whole of it.
_LEAST_GAIN = 0.05
# Single times leave out what happens to caches and memory: copies may cost less or more than they say.
_SCALES = {"": 1.0, ", copies at half": 0.5, ", copies at double": 2.0}


def is_searchable(plan: Plan) -> bool:
    """Whether there is something to choose, and nothing of it has been chosen before."""
    wanted = [row for row in plan.rows if row.is_wanted and row.shape]
    was_converted = any(
        row.strides == row.target_strides != CONTIGUOUS.strides(torch.Size(row.shape or ())) for row in wanted
    )
    return len(wanted) > 1 and not was_converted


def search(workload: Workload, contiguous: Plan, full: Plan) -> dict[str, Plan]:
    """The plans that are worth trying, by name; none that is one of the given ones.

    Three ways of the whole model are timed, unit by unit, each unit with inputs in the format that it is timed in:
    contiguous, channels-last, and channels-last activations with contiguous weights.

    Args:
        workload: a model with its inputs.
        contiguous: the plan that changes nothing.
        full: the one in channels-last that was fastest.
    """
    units = units_of(workload.model, full)
    ways = {
        "contiguous": with_entries(contiguous, units, is_last=False),
        "channels-last": with_entries(full, units, is_last=True),
        "activations": with_entries(without(full, units), units, is_last=True),
    }
    times: dict[str, dict[str, float]] = {way: {} for way in ways}
    for _ in range(_PASSES):
        for way, plan in ways.items():
            for path, taken in _times(workload, plan, units, is_first=not times[way]).items():
                times[way][path] = min(taken, times[way].get(path, math.inf))
    paths = {row.path for row in full.rows if row.action is Action.CONVERT} - set(sharing(workload.model, full))
    kept = {path for path in paths if _gain(times, path) > _LEAST_GAIN}
    found = {SITES: without(full, kept)} if kept else {}
    islands = Islands.of(workload, units, ways, times)
    for name, scale in _SCALES.items():
        mixed = islands.plan(full, kept, scale) if islands else None
        if mixed is not None and mixed not in found.values():
            found[ISLANDS + name] = mixed
    return found


def _gain(times: Mapping[str, Mapping[str, float]], path: str) -> float:
    """By which share a unit is faster with a contiguous weight, on channels-last activations."""
    converted, kept = times["channels-last"].get(path, 0.0), times["activations"].get(path, 0.0)
    return 1 - kept / converted if converted else 0.0


def _times(workload: Workload, plan: Plan, units: Mapping[str, nn.Module], is_first: bool) -> dict[str, float]:
    with ExitStack() as stack:
        restore_afterwards(stack, workload.model)
        stack.enter_context(workload.under(plan))
        if is_first:
            workload()
        return seconds_of_units(workload, units.items(), workload.device)
