"""The cheapest formats of a graph of modules, by a minimum cut: exact, for the costs that it is given."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Costs(NamedTuple):
    """What something costs in each of the two formats, in seconds; infinite where it cannot be in one."""

    contiguous: float
    channels_last: float


class Edge(NamedTuple):
    """A tensor goes from one node to others; those that want another format share one copy of it."""

    producer: str
    consumers: tuple[str, ...]
    copy: Costs
    """What the copy costs, into each format."""


def cheapest_formats(
    nodes: Mapping[str, Costs], edges: Iterable[Edge], together: Iterable[tuple[str, str]]
) -> dict[str, bool] | None:
    """Whether each node is channels-last, such that the sum of all costs is the least.

    A tensor's copy is paid once, whichever and however many consumers want it: two auxiliary nodes for each edge say
    that some consumer wants the one format, and the other.

    Args:
        nodes: by name, what each costs.
        edges: between them.
        together: pairs that have one format.

    Returns:
        `None` where no formats fulfil all of that.
    """
    import networkx

    graph = networkx.DiGraph()
    source, sink = object(), object()

    def pay(tail: object, head: object, seconds: float) -> None:
        """Costs so much where the tail is in channels-last and the head is not."""
        there = graph.get_edge_data(tail, head, {"capacity": 0})["capacity"]
        nanoseconds = seconds if math.isinf(seconds) else round(seconds * 1e9)  # whole numbers, which add up exactly
        graph.add_edge(tail, head, capacity=there + nanoseconds)

    for name, costs in nodes.items():
        pay(source, name, costs.contiguous)
        pay(name, sink, costs.channels_last)
    for one, other in together:
        pay(one, other, math.inf)
        pay(other, one, math.inf)
    for edge in edges:
        some, all_of_them = object(), object()  # want channels-last: at least one consumer; every one
        pay(some, edge.producer, edge.copy.channels_last)
        pay(edge.producer, all_of_them, edge.copy.contiguous)
        for consumer in edge.consumers:
            pay(consumer, some, math.inf)
            pay(all_of_them, consumer, math.inf)
    graph.add_nodes_from((source, sink))
    try:
        _, (in_channels_last, _) = networkx.minimum_cut(graph, source, sink)
    except networkx.NetworkXUnbounded:
        return None
    return {name: name in in_channels_last for name in nodes}
