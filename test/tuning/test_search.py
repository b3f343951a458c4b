"""What a search finds, from simulated times of units; and that what it finds computes the same."""

import pytest
import torch
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.tuning import islands, search
from torch_nhwc.tuning.policies import CONTIGUOUS, FULL, PRESERVED, fixed_policies
from torch_nhwc.tuning.workload import Workload, loss_of

LAST = torch.channels_last
WAYS = ("contiguous", "channels-last", "activations")


class Block(nn.Module):
    """Its second half is two ways that are given the same tensor."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.left, self.right = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        x = self.norm(self.stem(x))
        return self.head((self.left(x) + self.right(x)).relu())


@pytest.fixture
def x():
    return torch.randn(2, 3, 12, 12)


def found_in(model, x, monkeypatch, times, copy_seconds=0.01, mode="inference"):
    """What the search finds where units take so long in each of the three ways; 0.1 s each where nothing is said."""
    plans = fixed_policies(model, x)
    workload = Workload(model, x, [], mode, torch.device("cpu"), None, loss_of, None)
    ways = iter([*WAYS] * 3)

    def times_of(workload, plan, units, is_first):
        index = WAYS.index(next(ways))
        return {path: times.get(path, (0.1, 0.1, 0.1))[index] for path in units}

    monkeypatch.setattr(search, "_times", times_of)
    monkeypatch.setattr(islands, "_seconds_of_copy", lambda *_: copy_seconds)
    return search.search(workload, plans[CONTIGUOUS], plans.get(PRESERVED, plans[FULL]))


def formats_in(model, x):
    """By path, whether a module is given its input in channels-last."""
    found = {}

    def note(path):
        return lambda module, inputs, output: found.update(
            {path: inputs[0].is_contiguous(memory_format=LAST) and not inputs[0].is_contiguous()}
        )

    handles = [module.register_forward_hook(note(path)) for path, module in model.named_modules() if path]
    model(x)
    for handle in handles:
        handle.remove()
    return found


def test_a_weight_that_is_better_left_contiguous_is_left(x, monkeypatch):
    model = Block()
    found = found_in(
        model, x, monkeypatch, {"left": (0.2, 0.1, 0.08), "right": (0.2, 0.1, 0.099)} | slow("stem", "norm", "head")
    )
    assert list(found) == ["sites"]
    expected = model(x)
    nhwc.convert_(model, plan=found["sites"])
    assert torch.allclose(model(x), expected, atol=1e-5)
    assert model.left.weight.is_contiguous()
    assert not model.right.weight.is_contiguous()
    assert all(formats_in(model, x).values())


def slow(*paths):
    """Times of units that are slow contiguous."""
    return {path: (0.2, 0.1, 0.2) for path in paths}


def fast(*paths):
    """Times of units that are fast contiguous."""
    return {path: (0.1, 0.2, 0.2) for path in paths}


def test_an_island_has_copies_at_its_borders_and_one_for_two_users(x, monkeypatch):
    model = Block()
    found = found_in(model, x, monkeypatch, fast("stem", "norm", "head") | slow("left", "right"))
    (name, plan), *_ = found.items()
    assert name == "islands"
    assert [tuple(row) for row in plan.entries] == [
        ("left", "channels_last", True),
        ("right", "channels_last", True),
        ("head", "contiguous_format", False),
    ]
    assert nhwc.Plan.from_json(plan.to_json()) == plan
    expected = model(x)
    report = nhwc.convert_(model, plan=plan)
    assert torch.allclose(model(x), expected, atol=1e-5)
    assert formats_in(model, x) == {"stem": False, "norm": False, "left": True, "right": True, "head": False}
    report.revert()
    assert not any(formats_in(model, x).values())


def test_an_island_that_is_not_worth_its_copies_is_none(x, monkeypatch):
    times = fast("stem", "norm", "head") | slow("left", "right")
    assert found_in(Block(), x, monkeypatch, times, copy_seconds=0.11) != {}  # 0.2 s are gained by two copies
    assert list(found_in(Block(), x, monkeypatch, times, copy_seconds=0.09)) == ["islands"]
    assert found_in(Block(), x, monkeypatch, times, copy_seconds=1.0) == {}


def test_copies_that_cost_less_or_more_than_they_seem_give_at_most_three_candidates(x, monkeypatch):
    times = fast("stem", "norm", "head") | slow("left", "right")
    assert list(found_in(Block(), x, monkeypatch, times, copy_seconds=0.15)) == ["islands, copies at half"]
    times |= {"norm": (0.1, 0.103, 0.103)}
    assert len(found_in(Block(), x, monkeypatch, times, copy_seconds=0.004)) <= 3


def test_gradients_are_the_same_through_an_island(x, monkeypatch):
    model = Block()
    model(x).square().sum().backward()
    expected = [each.grad for each in model.parameters()]
    model.zero_grad()
    found = found_in(model, x, monkeypatch, fast("stem", "norm", "head") | slow("left", "right"), mode="training")
    nhwc.convert_(model, plan=found["islands"])
    model(x).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-4)


def test_what_writes_in_place_has_the_format_of_what_it_is_given(x, monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    found = found_in(model, x, monkeypatch, slow("0", "2") | fast("1", "3"))
    assert {row.path: row.memory_format for row in found["islands"].entries} == {
        "0": "channels_last",
        "3": "contiguous_format",
    }
    expected = model(x)
    nhwc.convert_(model, plan=found["islands"])
    assert torch.allclose(model(x), expected, atol=1e-5)


def test_a_layer_that_drops_the_format_needs_a_copy_behind_it(x, monkeypatch):
    class Drops(nn.Module):
        def forward(self, x):
            return (x * 2).contiguous()

    model = nn.Sequential(nn.Conv2d(3, 8, 3), Drops(), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    found = found_in(model, x, monkeypatch, slow("0", "2") | {"1": (0.1, 0.1, 0.1)} | fast("3"))
    assert {row.path: row.memory_format for row in found["islands"].entries} == {
        "0": "channels_last",
        "2": "channels_last",
        "3": "contiguous_format",
    }


def test_behind_a_layer_that_drops_the_format_all_the_rest_can_go_on_in_it(monkeypatch):
    model, x = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), torch.randn(2, 1, 12, 12)
    found = found_in(model, x, monkeypatch, slow("0", "1", "2"))
    assert found["islands"].entries[-1] == ("1", "channels_last", False)  # the first weight has one channel, and stays
    nhwc.convert_(model, plan=found["islands"])
    assert formats_in(model, x) == {"0": False, "1": True, "2": True}


def test_weights_of_two_modules_that_are_one_have_one_format(x, monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 3))
    model[2].weight = model[0].weight
    found = found_in(model, x, monkeypatch, {"0": (0.1, 0.3, 0.2), "1": (0.3, 0.1, 0.1), "2": (0.3, 0.1, 0.1)})
    assert "sites" not in found
    for plan in found.values():
        entries = {row.path: row.memory_format for row in plan.entries}
        assert entries.get("0") in (None, "channels_last")
        nhwc.convert_(model, plan=plan).revert()


def test_the_times_of_units_are_measured_in_place(x):
    model = Block()
    plans = fixed_policies(model, x)
    workload = Workload(model, x, [], "training", torch.device("cpu"), None, loss_of, None)
    before = [(each.stride(), each.clone()) for each in model.parameters()]
    found = search.search(workload, plans[CONTIGUOUS], plans[PRESERVED])
    for plan in found.values():
        with workload.under(plan):
            workload()
    assert all(
        each.stride() == strides and torch.equal(each, old) for each, (strides, old) in zip(model.parameters(), before)
    )
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_what_has_been_converted_already_is_not_searched(x):
    model = Block()
    assert search.is_searchable(nhwc.plan(model))
    assert not search.is_searchable(nhwc.plan(nn.Sequential(nn.Conv2d(3, 8, 3))))
    nhwc.convert_(model)
    assert not search.is_searchable(nhwc.plan(model))
