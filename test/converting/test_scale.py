"""Large models: the walk is linear, and as deep as it needs to be."""

import sys
from functools import partial

import pytest
import torch
from torch import nn

import torch_nhwc as nhwc


def wide(count):
    """Return a tree of `count` modules, a tenth of them convolutions."""
    blocks = [
        nn.Sequential(nn.Conv2d(2, 2, 1), *(nn.Identity() for _ in range(8)))  # ten modules with the container
        for _ in range(count // 10 - 1)
    ]
    return nn.Sequential(*blocks, *(nn.Identity() for _ in range(9)))


def calls_of(function):
    """How many Python functions are called."""
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("state", [None, "of one optimizer", "of an optimizer for each parameter"])
def test_work_grows_as_the_model_does(state):
    calls = []
    for count in (1_000, 10_000):
        model = wide(count)
        optimizer = None
        if state is not None:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            groups = [[each] for each in model.parameters()] if "each" in state else [model.parameters()]
            optimizer = [torch.optim.AdamW(group) for group in groups]
            for each in optimizer:
                each.step()
        done = []
        convert = partial(nhwc.convert_, model, optimizer=optimizer)
        calls.append(calls_of(lambda convert=convert, done=done: done.append(convert())))
        [report] = done
        assert len(report.companions) == (0 if state is None else 3 * len(report.rows))  # a gradient, and two averages
    assert calls[1] < 11 * calls[0]
