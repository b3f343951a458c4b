"""Plans that differ from a given one: in weights that stay as they are, and in what modules are given."""

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from torch_nhwc.planning.plans import Plan
from torch_nhwc.planning.rows import Action, EntryRow, PlanRow
from torch_nhwc.reasons import Reason

# What a format is called in a plan, by whether it is channels-last.
NAMES = ("contiguous_format", "channels_last")


def with_entries(plan: Plan, paths: Collection[str], is_last: bool) -> Plan:
    """The plan with the inputs of some modules brought into a format, in place of the model's."""
    rows = tuple(EntryRow(path, NAMES[is_last], is_shared=False) for path in paths)
    return replace(plan, input_format=None, entries=rows)


def without(plan: Plan, paths: Collection[str]) -> Plan:
    """The plan with the weights of some modules left as they are."""

    def kept(row: PlanRow) -> PlanRow:
        if row.path not in paths or row.action not in (Action.CONVERT, Action.RESTRIDE):
            return row
        return row._replace(target_strides=None, bytes_to_move=0, action=Action.KEEP, reason=Reason.FASTER_CONTIGUOUS)

    return replace(plan, rows=tuple(map(kept, plan.rows)))


def sharing(model: nn.Module, plan: Plan) -> dict[str, str]:
    """By path, modules whose weights are those of another module, and that one's path."""
    first: dict[int, str] = {}
    shared: dict[str, str] = {}
    tensors = dict(model.named_parameters(remove_duplicate=False))
    for row in plan.rows:
        tensor = tensors.get(row.full_name)
        if tensor is not None and first.setdefault(id(tensor), row.path) != row.path:
            other = first[id(tensor)]
            shared |= {row.path: other, other: row.path}
    return shared
