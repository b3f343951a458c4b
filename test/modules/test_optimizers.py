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


class FlattensCopies(torch.optim.SGD):
    """Takes a view that contiguous memory always has."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.contiguous().view(-1)
        return super().step(closure)


class Wraps(torch.optim.SGD):
    """Cannot be made of parameters alone, and so not be tried: what its code says remains."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.1)

    def step(self, closure=None):
        return self.param_groups[0]["params"][0].detach().view(8, -1) is None


class Lookahead(torch.optim.Optimizer):
    """Steps another optimizer, which it has under one name or the other."""

    def __init__(self, optimizer, name):
        setattr(self, name, optimizer)
        self.defaults = {}

    param_groups = property(lambda self: vars(self).get("optimizer", vars(self).get("base_optimizer")).param_groups)
    state = property(lambda self: {})


@pytest.mark.parametrize("names", [("optimizer",), ("base_optimizer",), ("optimizer", "base_optimizer")], ids=str)
def test_h07_what_a_wrapped_optimizer_does_counts(names):
    def wrapped(optimizer):
        for name in names:
            optimizer = Lookahead(optimizer, name)
        return optimizer

    model = network()
    optimizer = wrapped(NormalisesByChannel(model.parameters(), lr=0.1))
    remark = f"NormalisesByChannel: {nhwc.Reason.VIEWS_PARAMETERS.value}"
    assert nhwc.convert_(model, optimizer=optimizer).remarks == (remark,)
    model = network()
    assert nhwc.convert_(model, optimizer=wrapped(FlattensCopies(model.parameters(), lr=0.1))).remarks == ()
    model = network()
    with pytest.warns(UserWarning, match="the optimizer takes a view"):
        nhwc.convert_(model, optimizer=wrapped(torch.optim.LBFGS(model.parameters())))


def test_an_optimizer_that_holds_itself_is_asked_once():
    model = network()
    optimizer = NormalisesByChannel(model.parameters(), lr=0.1)
    optimizer.optimizer = optimizer
    assert len(nhwc.plan(model, optimizer=optimizer).rows) == 3


OPTIMIZERS = {
    "raises": (lambda model: NormalisesByChannel(model.parameters(), lr=0.1), True),
    "does not": (lambda model: FlattensCopies(model.parameters(), lr=0.1), False),
    "cannot be tried": (Wraps, True),
    "PyTorch's own": (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), False),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_h07_optimizers_that_take_views_are_remarked_on(kind):
    make, raises = OPTIMIZERS[kind]
    model = network()
    optimizer = make(model)
    remark = f"{type(optimizer).__name__}: {nhwc.Reason.VIEWS_PARAMETERS.value}"
    report = nhwc.convert_(model, optimizer=[optimizer, make(model)])
    assert report.remarks == ((remark,) if raises else ())
    assert nhwc.convert_(network(), optimizer=()).remarks == ()
    model = network()
    assert remark not in nhwc.convert_(model, optimizer=make(model), each_forward=True).remarks
