"""Optimizers that flatten their parameters or take views of them: recognised, and said."""

import pytest
import torch
from torch import nn

import torch_nhwc as nhwc

STOCK = nn.utils.convert_conv2d_weight_memory_format


def network():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.Conv2d(4, 4, 3))


def test_h07_lbfgs_refuses_its_weights_that_would_move_and_steps_on():
    model, free = network(), nn.Conv2d(3, 4, 3)
    both = nn.ModuleList([model, free])
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3, 8, 8)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.warns(UserWarning, match="the optimizer takes a view"):
        report = nhwc.convert_(both, optimizer=optimizer)
    reasons = {row.full_name: row.reason for row in report.plan.rows}
    assert reasons == {
        "0.0.weight": nhwc.Reason.FLATTENING_OPTIMIZER,
        "0.3.weight": None,  # 1x1: no bytes move
        "0.4.weight": nhwc.Reason.FLATTENING_OPTIMIZER,
        "1.weight": None,
    }
    optimizer.step(closure)

    STOCK(model, torch.channels_last)
    with pytest.raises(RuntimeError, match="view size is not compatible"):  # what plain PyTorch does
        optimizer.step(closure)


class NormalisesByChannel(torch.optim.SGD):
    """Like AdamP: takes a view of each filter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.view(parameter.shape[0], -1).norm())
        return super().step(closure)


def test_h07_optimizers_whose_code_takes_views_are_remarked_on():
    model = network()
    optimizer = NormalisesByChannel(model.parameters(), lr=0.1)
    report = nhwc.convert_(model, optimizer=optimizer)
    assert report.remarks == (f"NormalisesByChannel: {nhwc.Reason.VIEWS_PARAMETERS.value}",)
    assert report.remarks[0].split(":")[0] in str(report)
    model = network()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    assert nhwc.convert_(model, optimizer=plain).remarks == ()
