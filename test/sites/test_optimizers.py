"""Optimizers that need contiguous parameters: their weights are refused, and the optimizer steps on."""

import pytest
import torch
from torch import nn

import torch_nhwc as nhwc


def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 3))


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer, which it has under one name or the other."""

    def __init__(self, optimizer, name):
        setattr(self, name, optimizer)
        self.defaults = {}

    param_groups = property(lambda self: vars(self).get("optimizer", vars(self).get("base_optimizer")).param_groups)
    state = property(lambda self: {})


@pytest.mark.parametrize("names", [(), ("optimizer",), ("base_optimizer", "optimizer")], ids=str)
def test_h07_lbfgs_refuses_its_weights_that_would_move_and_steps_on(names):
    model, free = network(), nn.Conv2d(3, 4, 3)
    given = optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    for name in names:
        given = Lookahead(given, name)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3, 8, 8)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.warns(UserWarning, match="the optimizer takes a view"):
        report = nhwc.convert_(nn.ModuleList([model, free]), optimizer=given)
    assert {row.full_name: row.reason for row in report.plan.rows} == {
        "0.0.weight": nhwc.Reason.FLATTENING_OPTIMIZER,
        "0.3.weight": None,  # 1x1: no bytes move
        "0.4.weight": nhwc.Reason.FLATTENING_OPTIMIZER,
        "1.weight": None,
    }
    optimizer.step(closure)

    nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    with pytest.raises(RuntimeError, match="view size is not compatible"):  # what plain PyTorch does
        optimizer.step(closure)


def test_an_optimizer_that_holds_itself_is_asked_once():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.optimizer = optimizer
    assert len(nhwc.plan(model, optimizer=optimizer).rows) == 3
