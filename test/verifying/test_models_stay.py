"""`verify` leaves the models, their inputs and everything random as they were, on every way out."""

import copy
import random

import numpy
import pytest
import torch
from comparison import assert_as_it_was, layouts, state_of
from selection import some_of
from torch import nn
from torch.nn.modules import module as nn_module

import torch_nhwc as nhwc


class Restless(nn.Module):
    """Changes what a forward can change, and raises a given error at a given call."""

    raises, at, calls = None, 0, 0

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("not_yet", None)

    def forward(self, x):
        Restless.calls += 1
        if Restless.raises is not None and Restless.calls == Restless.at:
            raise Restless.raises
        torch.rand(3), random.random(), numpy.random.rand()
        self.count += 1
        self.not_yet = torch.ones(2)
        self.register_buffer("another", torch.ones(3))
        return x.mul_(2)


def pair():
    torch.manual_seed(0)
    before = nn.Sequential(Restless(), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(), nn.ReLU(inplace=True))
    before[2].eval()
    before[1].weight.grad = torch.randn_like(before[1].weight)
    before[1].bias.requires_grad_(False)
    after = copy.deepcopy(before)
    nhwc.convert_(after)
    return before, after


def generators():
    return torch.rand(2).tolist(), random.random(), numpy.random.rand()


def everything_of(model):
    """Return what `state_of` does not see."""
    return [
        (type(module), module.training, len(module._forward_hooks), len(module._forward_pre_hooks), dict(vars(module)))
        for module in model.modules()
    ], [(parameter.requires_grad, parameter.grad) for parameter in model.parameters()]


def assert_all_stays(run, before, after, x):
    Restless.calls = 0
    states = [(state_of(model), layouts(model), everything_of(model)) for model in (before, after)]
    inputs, version, call = x.clone(), x._version, nn.Module.__call__
    hooks = len(nn_module._global_forward_pre_hooks), len(nn_module._global_forward_hooks)
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    expected = generators()
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    run()
    assert generators() == expected
    for model, (values, layout, everything) in zip((before, after), states):
        assert_as_it_was(model, values, layout)
        assert str(everything_of(model)) == str(everything)
    assert torch.equal(x, inputs)
    assert (x._version, x.grad) == (version, None)
    assert nn.Module.__call__ is call
    assert (len(nn_module._global_forward_pre_hooks), len(nn_module._global_forward_hooks)) == hooks
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("at", some_of([1, 4, 30], 30))
@pytest.mark.parametrize("raises", [None, KeyError("no such thing"), KeyboardInterrupt()], ids=repr)
def test_all_stays_as_it_was_also_after_exceptions(raises, at, monkeypatch):
    before, after = pair()
    x = torch.randn(2, 3, 8, 8).requires_grad_()
    monkeypatch.setattr(Restless, "raises", raises)
    monkeypatch.setattr(Restless, "at", at)

    def run():
        try:
            nhwc.verify(before, after, x)
        except (KeyError, KeyboardInterrupt) as error:
            assert error is raises  # noqa: PT017  some are rows of the result

    assert_all_stays(run, before, after, x)


@pytest.mark.parametrize("region", some_of([torch.no_grad, torch.inference_mode], torch.inference_mode))
def test_gradients_are_compared_in_the_callers_region_without(region):
    before, after = pair()
    with region():
        x = torch.randn(2, 3, 8, 8)
        verification = nhwc.verify(before, after, x)
        assert not torch.is_grad_enabled()
    assert verification
    assert "gradient of weight" in {row.what for row in verification.rows}
