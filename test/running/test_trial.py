"""Trying optimizers from elsewhere on a small channels-last parameter."""

import importlib
import random

import numpy
import pytest
import torch
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import torch_nhwc
from torch_nhwc.running import trial
from torch_nhwc.running.trial import raises_on_channels_last

pytorch_optimizer = importlib.import_module("pytorch_optimizer")

WEIGHTS = [torch.nn.Parameter(torch.randn(4, 3, 3, 3))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["AdamP", "SGDP", "Nero", "AdamWSN", "DASH", "MARS", "SaRA", "Shampoo", "SPAM"])
def test_h07_what_is_tried_is_right(name):
    optimizer = getattr(pytorch_optimizer, name)(WEIGHTS)
    assert raises_on_channels_last(optimizer, 4) is (name in ("AdamP", "SGDP", "Nero"))


class Drawing(SGD):
    """Draws numbers, wherever they come from."""

    def step(self, closure=None):
        torch.rand(1), random.random(), numpy.random.rand()
        return super().step(closure)


def test_random_generators_are_where_they_were_and_a_class_is_tried_once(monkeypatch):
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    optimizer = Drawing(WEIGHTS, lr=0.1)
    assert raises_on_channels_last(optimizer, 4) is False
    after = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    monkeypatch.setattr(trial, "_steps", None)
    assert raises_on_channels_last(Drawing(WEIGHTS, lr=0.1), 4) is False


class Wrapping(Optimizer):
    """Steps another optimizer, which must not be stepped to see what happens."""

    def __init__(self, optimizer):
        self.optimizer, self.defaults = optimizer, {}

    def step(self, closure=None):
        raise AssertionError


class Failing(SGD):
    def step(self, closure=None):
        raise ValueError


class Demanding(Drawing):
    def __init__(self, params, model):
        super().__init__(params)


@pytest.mark.parametrize(
    "optimizer", [Wrapping(SGD(WEIGHTS)), Failing(WEIGHTS), Demanding(WEIGHTS, None)], ids=["wraps", "fails", "demands"]
)
def test_what_cannot_be_tried_is_not_known(optimizer):
    assert raises_on_channels_last(optimizer, 4) is None


def test_nothing_is_tried_with_other_processes():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert raises_on_channels_last(Drawing(WEIGHTS, lr=0.3), 4) is None
    finally:
        torch.distributed.destroy_process_group()


def test_nothing_of_the_model_is_stepped_and_no_hook_sees_the_trial():
    seen = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    optimizer = pytorch_optimizer.AdamP(WEIGHTS, weight_decay=0.7)
    before = WEIGHTS[0].detach().clone()
    try:
        assert raises_on_channels_last(optimizer, 4)
    finally:
        handle.remove()
    assert seen == []
    assert torch.equal(WEIGHTS[0], before)
    assert not optimizer.state


def test_what_a_step_prints_in_the_trial_is_not_seen(capsys):
    class Printing(Drawing):
        def step(self, closure=None):
            print("stepped")
            return super().step(closure)

    assert raises_on_channels_last(Printing(WEIGHTS), 4) is False
    assert capsys.readouterr().out == ""
    Printing(WEIGHTS).step()
    assert capsys.readouterr().out == "stepped\n"


class Decaying(Optimizer):
    """Writes to what it was made with."""

    made = 0

    def __init__(self, params, lr=0.1, model=None, losses=()):
        Decaying.made += 1
        super().__init__(params, {"lr": lr, "model": model, "losses": losses})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if group["model"] is not None:
                group["model"].weight.mul_(2)
            if isinstance(group["losses"], list):
                group["losses"].append(1)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].mul_(0.9)


@pytest.mark.parametrize("kind", ["tensor", "model", "list"])
def test_h07_nothing_that_an_optimizer_was_made_with_is_stepped(kind):
    model = torch.nn.Conv2d(3, 4, 3)
    before = model.weight.detach().clone()
    given = {"tensor": {"lr": torch.tensor(1.0)}, "model": {"model": model}, "list": {"losses": []}}[kind]
    optimizer = Decaying(model.parameters(), **given)
    Decaying.made = 0
    assert raises_on_channels_last(optimizer, 4) is (False if kind == "list" else None)
    torch_nhwc.convert_(model, optimizer=optimizer)
    assert torch.equal(model.weight, before)
    assert given.get("lr", 1) == 1
    assert given.get("losses", []) == []
    assert Decaying.made == (2 if kind == "list" else 0)


def test_a_class_whose_step_is_pytorchs_own_is_not_made_again():
    class Logged(torch.optim.AdamW):
        made = 0

        def __init__(self, params):
            Logged.made += 1
            super().__init__(params)

    assert raises_on_channels_last(Logged(WEIGHTS), 4) is False
    assert Logged.made == 1
