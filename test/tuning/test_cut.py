"""The minimum cut against an exhaustive search."""

import itertools
import math
import random

import pytest

from torch_nhwc.tuning.cut import Costs, Edge, cheapest_formats


def total(nodes, edges, is_last):
    """What all of it costs, by whether each node is channels-last."""
    of_copies = (
        edge.copy[into]
        for edge in edges
        for into in {is_last[consumer] for consumer in edge.consumers} - {is_last[edge.producer]}
    )
    return sum(costs[is_last[name]] for name, costs in nodes.items()) + sum(of_copies)


def exhaustive_search(nodes, edges, together):
    """The least cost over all formats."""
    costs = []
    for formats in itertools.product((False, True), repeat=len(nodes)):
        is_last = dict(zip(nodes, formats))
        if all(is_last[one] == is_last[other] for one, other in together):
            costs.append(total(nodes, edges, is_last))
    return min(costs, default=math.inf)


def random_graph(seed):
    chance = random.Random(seed)
    names = [f"n{index}" for index in range(chance.randint(2, 8))]

    def cost():
        return round(chance.random(), 3)

    def of_node():
        fixed = chance.random()
        if fixed < 0.1:
            return Costs(cost(), math.inf)
        return Costs(math.inf, cost()) if fixed < 0.2 else Costs(cost(), cost())

    nodes = {name: of_node() for name in names}
    edges = []
    for index, name in enumerate(names[:-1]):
        for _ in range(chance.randint(0, 2)):
            later = names[index + 1 :]
            consumers = chance.sample(later, chance.randint(1, len(later)))
            edges.append(Edge(name, tuple(consumers), Costs(cost() / 3, cost() / 3)))
    pairs = [tuple(chance.sample(names, 2)) for _ in range(chance.randint(0, 2))]
    return nodes, edges, pairs


@pytest.mark.parametrize("seed", range(60))
def test_no_formats_cost_less_than_the_cut(seed):
    nodes, edges, together = random_graph(seed)
    is_last = cheapest_formats(nodes, edges, together)
    least = exhaustive_search(nodes, edges, together)
    if is_last is None:
        assert math.isinf(least)
        return
    assert all(is_last[one] == is_last[other] for one, other in together)
    assert total(nodes, edges, is_last) == pytest.approx(least, abs=1e-6)


@pytest.mark.parametrize("users", range(1, 7))
def test_one_copy_for_many_users_is_paid_once(users):
    names = [f"user {index}" for index in range(users)]
    nodes = {"producer": Costs(0.0, math.inf)} | dict.fromkeys(names, Costs(0.3, 0.0))
    edges = [Edge("producer", tuple(names), Costs(1.0, 0.8))]
    is_last = cheapest_formats(nodes, edges, [])
    assert {is_last[name] for name in names} == {0.3 * users > 0.8}
    apart = [Edge("producer", (name,), Costs(1.0, 0.8)) for name in names]
    assert set(cheapest_formats(nodes, apart, []).values()) == {False}


def test_what_cannot_be_has_no_answer():
    nodes = {"a": Costs(0.0, math.inf), "b": Costs(math.inf, 0.0)}
    assert cheapest_formats(nodes, [], [("a", "b")]) is None
    assert cheapest_formats(nodes, [], []) == {"a": False, "b": True}
