"""Islands: parts of a model in one format and parts in the other, where that is cheaper than one format for all."""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import nn

from torch_nhwc.entries import in_format
from torch_nhwc.planning.plans import Plan
from torch_nhwc.planning.rows import EntryRow
from torch_nhwc.running.rehearsal import restore_afterwards
from torch_nhwc.running.timing import seconds
from torch_nhwc.tuning import cut
from torch_nhwc.tuning.cut import Costs, Edge
from torch_nhwc.tuning.flow import FIXED, Activation, Flow, observe
from torch_nhwc.tuning.variants import NAMES, sharing, without
from torch_nhwc.tuning.workload import Workload

# A single time of several.
_TRIES = 3


@dataclass
class Islands:
    """A model as a graph of units with their times, and activations with those of their copies."""

    flow: Flow
    nodes: dict[str, Costs]
    outputs: dict[str, str]
    """By unit, the node that stands for its output, where that has a format of its own."""
    copies: dict[int, Costs]
    """By the identity of each activation."""
    together: list[tuple[str, str]]

    @classmethod
    def of(
        cls,
        workload: Workload,
        units: Mapping[str, nn.Module],
        ways: Mapping[str, Plan],
        times: Mapping[str, Mapping[str, float]],
    ) -> "Islands | None":
        """What is seen of a model; `None` where networkx is not installed."""
        try:
            import networkx  # noqa: F401
        except ImportError:
            return None
        flows = {}
        for way in ("contiguous", "channels-last"):
            with ExitStack() as stack:
                restore_afterwards(stack, workload.model)
                stack.enter_context(workload.under(ways[way]))
                flows[way] = observe(workload, units)
        flow, other = flows["contiguous"], flows["channels-last"]
        nodes, outputs = {}, {}
        for path in units:
            of_weights = (times[way].get(path, 0.0) for way in ("channels-last", "activations"))
            nodes[path] = Costs(times["contiguous"].get(path, 0.0), min(of_weights))
        for name, is_last in flow.outputs.items():
            if name.startswith(FIXED):
                nodes[name] = _FIXED[is_last]
            elif is_last or other.outputs.get(name) is False:  # in both, or in none
                stays = bool(is_last and other.outputs.get(name))
                outputs[name] = f"{FIXED}{name}"
                nodes[outputs[name]] = _FIXED[stays]
        by_kind: dict[tuple[torch.Size, torch.dtype], Costs] = {}
        for each in flow.activations:
            kind = each.shape, each.dtype
            if each.consumers and kind not in by_kind:
                by_kind[kind] = Costs(*(_seconds_of_copy(workload, *kind, is_last) for is_last in (False, True)))
        copies = {id(each): by_kind[each.shape, each.dtype] for each in flow.activations if each.consumers}
        together = [(outputs.get(one, one), outputs.get(other, other)) for one, other in flow.joined]
        together += [(path, outputs.get(producer, producer)) for path, producer in flow.passed]
        together += sharing(workload.model, ways["channels-last"]).items()
        return cls(flow, nodes, outputs, copies, together)

    def plan(self, full: Plan, kept: Collection[str], scale: float) -> Plan | None:
        """The plan of the cheapest formats; `None` where that is one format for all, without a copy inside.

        Args:
            full: the plan for channels-last.
            kept: paths of units whose weights are better left contiguous.
            scale: of the copies' times.
        """
        edges = [
            Edge(self._node_of(each), consumers, Costs(*(scale * cost for cost in self.copies[id(each)])))
            for each in self.flow.activations
            for consumers in _groups(each)
        ]
        is_last = cut.cheapest_formats(self.nodes, edges, self.together)
        if is_last is None:
            return None
        used = {consumer for each in self.flow.activations for consumer in each.consumers}
        entries: dict[str, EntryRow] = {}
        is_mixed = len({is_last[path] for path in used}) > 1
        for each in self.flow.activations:
            before = is_last[self._node_of(each)]
            others = [path for path in sorted(each.consumers) if is_last[path] != before]
            is_inside = not each.producer.startswith(FIXED)
            is_mixed |= is_inside and bool(others)  # behind a layer that drops the format
            is_shared = len(others) > 1 and is_inside
            for path in others:
                was_shared = path in entries and entries[path].is_shared
                entries[path] = EntryRow(path, NAMES[is_last[path]], is_shared or was_shared)
        if not is_mixed:
            return None
        contiguous = {path for path in used if not is_last[path]}
        return replace(without(full, {*kept, *contiguous}), input_format=None, entries=tuple(entries.values()))

    def _node_of(self, activation: Activation) -> str:
        return self.outputs.get(activation.producer, activation.producer)


_FIXED = {
    True: Costs(math.inf, 0.0),
    False: Costs(0.0, math.inf),
    None: Costs(0.0, 0.0),
}


def _groups(activation: Activation) -> Iterator[tuple[str, ...]]:
    """The consumers that can share a copy: all of them, but of what comes from outside, which others may write to."""
    consumers = tuple(sorted(activation.consumers))
    if activation.producer.startswith(FIXED):
        yield from ((each,) for each in consumers)
    elif consumers:
        yield consumers


def _seconds_of_copy(workload: Workload, shape: torch.Size, dtype: torch.dtype, is_last: bool) -> float:
    """Of an activation into a format, and in training of its gradient on the way back."""

    def least(is_last: bool) -> float:
        x = in_format(torch.zeros(shape, dtype=dtype, device=workload.device), NAMES[not is_last])
        return min(seconds(lambda: in_format(x, NAMES[is_last]), str(workload.device)) for _ in range(_TRIES))

    return least(is_last) + (least(not is_last) if workload.mode == "training" else 0.0)
