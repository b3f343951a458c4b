"""What goes where in a model, and how long its units take."""

import torch
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.tuning import units
from torch_nhwc.tuning.flow import FIXED, observe
from torch_nhwc.tuning.units import Clock, units_of
from torch_nhwc.tuning.workload import Workload, loss_of


class Residual(nn.Module):
    """Two ways that are added, and one tensor that two units are given."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.left = nn.Conv2d(8, 8, 3, padding=1)
        self.right = nn.Conv2d(8, 8, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.act(self.stem(x * 2))
        x = self.left(x) + self.right(x)
        return self.head(self.pool(x.relu()).flatten(1))


NOW = [0]


class Slow(nn.Module):
    """Takes a while, in both directions."""

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            NOW[0] += 2
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            NOW[0] += 5
            return gradient * 2

    def forward(self, x):
        return self.Sleep.apply(x)


def workload(model, x, mode="inference"):
    return Workload(model, x, [], mode, torch.device("cpu"), None, loss_of, None)


def flow_of(model, x):
    return observe(workload(model, x), units_of(model, nhwc.plan(model)))


def test_activations_are_followed_from_unit_to_unit():
    flow = flow_of(Residual(), torch.randn(2, 3, 8, 8))
    consumed = {(each.producer.split(":")[0], *sorted(each.consumers)) for each in flow.activations if each.consumers}
    assert consumed == {(FIXED[:5], "stem"), ("stem", "act", "left", "right"), ("left", "pool")}
    assert flow.passed == {("act", "stem")}  # which writes in place
    assert flow.joined == {("left", "right")}
    assert flow.outputs["stem"] is False
    (entering,) = (each for each in flow.activations if "stem" in each.consumers)
    assert (entering.shape, entering.dtype) == ((2, 3, 8, 8), torch.float32)


def test_nothing_of_the_model_is_left_behind():
    model = Residual()
    flow_of(model, torch.randn(2, 3, 8, 8))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_unit_that_calls_other_code_with_a_weight_of_its_own_is_one_unit():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3, 3, 3))
            self.act = nn.ReLU()

        def forward(self, x):
            return self.act(nn.functional.conv2d(x, self.weight))

    model, x = nn.Sequential(Own(), nn.ReLU()), torch.randn(1, 3, 8, 8)
    assert list(units_of(model, nhwc.plan(model, example_inputs=x))) == ["0", "1"]
    assert list(units_of(model, nhwc.plan(model))) == ["0.act", "1"]


def test_the_clock_tells_units_apart_in_both_directions(monkeypatch):
    monkeypatch.setattr(units.time, "perf_counter", lambda: NOW[0])
    model, x = nn.Sequential(nn.Conv2d(3, 3, 1), Slow(), nn.ReLU()), torch.randn(1, 3, 4, 4)
    clock = Clock(torch.device("cpu"))
    with clock.watching(units_of(model, nhwc.plan(model)).items()):
        model(x)
    assert clock.seconds == {"0": 0, "1": 2, "2": 0}
    with clock.watching(units_of(model, nhwc.plan(model)).items()):
        workload(model, x, "training")()
    assert clock.seconds == {"0": 0, "1": 2 + 2 + 5, "2": 0}
    assert model[0].weight.grad is not None
    assert not model[1]._forward_hooks
