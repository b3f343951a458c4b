"""Optimizer state and gradients that came in another layout than their parameters'."""

import io

import pytest
import torch
from guarding import unguarded
from tied_network import converted, network, train
from torch import nn

import torch_nhwc as nhwc

OPTIMIZERS = {
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "foreach AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "fused SGD with momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
    "fused Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
}


def saved(model, optimizer):
    buffer = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), buffer)
    return buffer


def resumed(buffer, make, is_converted):
    buffer.seek(0)
    state, optimizer_state = torch.load(buffer, weights_only=True)
    model = network(1)
    plan = nhwc.convert_(model).plan if is_converted else nhwc.plan(model, torch.contiguous_format)
    optimizer = make(model.parameters())
    model.load_state_dict(state)
    optimizer.load_state_dict(optimizer_state)
    return model, plan, optimizer


@pytest.mark.parametrize("loads_converted", [False, True], ids=["into contiguous", "into converted"])
@pytest.mark.parametrize("saves_converted", [False, True], ids=["from contiguous", "from converted"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_h06_training_goes_on_from_a_checkpoint_in_the_other_layout(name, saves_converted, loads_converted):
    make = OPTIMIZERS[name]
    model = network()
    if saves_converted:
        nhwc.convert_(model)
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    buffer = saved(model, optimizer)
    expected = train(model, optimizer, 10, seed=1)

    # What plain PyTorch does: state comes in the layout that it was saved in, and fused optimizers read it by place.
    plain, plan, plain_optimizer = resumed(buffer, make, loads_converted)
    apart = saves_converted != loads_converted
    assert bool(nhwc.check(plain, plan, optimizer=plain_optimizer)) == apart
    with unguarded():
        losses = train(plain, plain_optimizer, 10, seed=1)
    equal = torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-4)
    assert equal == (not apart or not name.startswith("fused"))

    ours, plan, our_optimizer = resumed(buffer, make, loads_converted)
    aligned = nhwc.align_(ours, our_optimizer)
    assert bool(aligned) == apart
    assert {row.label for row in aligned} <= {"exp_avg", "exp_avg_sq", "momentum_buffer", "sum"}
    assert nhwc.check(ours, plan, optimizer=our_optimizer) == []
    assert nhwc.align_(ours, our_optimizer) == []
    torch.testing.assert_close(train(ours, our_optimizer, 10, seed=1), expected, rtol=1e-4, atol=1e-6)


def test_align_names_what_it_has_laid_out_and_looks_at_every_parameter():
    model, _ = converted()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    optimizer.load_state_dict(nhwc.contiguous_state_dict(optimizer.state_dict()))
    rows = nhwc.align_(model, optimizer)
    assert {(row.site, row.label) for row in rows} == {
        (name, label)
        for name in ("stem.weight", "block.weight", "depthwise.weight", "volume.weight", "head.weight")
        for label in ("exp_avg", "exp_avg_sq")
        if name != "depthwise.weight"  # one channel: every element is at its place in both layouts
    }
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert all(a == b for n, a, b in zip(parameter.shape, state["exp_avg"].stride(), parameter.stride()) if n > 1)


def test_align_repairs_gradients_of_another_layout():
    model, _ = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model.block.weight.grad = torch.randn(4, 4, 3, 3)
    expected = model.block.weight.detach() - 0.1 * model.block.weight.grad
    [row] = nhwc.align_(model, optimizer)
    assert (row.site, row.label) == ("block.weight", "grad")
    optimizer.step()
    torch.testing.assert_close(model.block.weight.detach(), expected)


def test_align_leaves_sparse_gradients_and_state_of_other_shapes():
    model = nn.ModuleDict({"table": nn.Embedding(5, 3, sparse=True), "layer": nn.Conv2d(3, 4, 3)})
    nhwc.convert_(model)
    model["table"](torch.tensor([1, 2])).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert nhwc.align_(model, optimizer) == []
    factored = torch.optim.Adafactor(model["layer"].parameters())
    model["layer"](torch.randn(1, 3, 5, 5)).sum().backward()
    factored.step()
    assert nhwc.align_(model, factored) == []


def test_align_takes_several_optimizers():
    model, plan = converted()
    first = torch.optim.AdamW(model.block.parameters(), fused=True)
    second = torch.optim.SGD(model.volume.parameters(), momentum=0.9, fused=True)
    model(torch.randn(2, 2, 6, 6)).sum().backward()
    for optimizer in (first, second):
        with unguarded():  # one that the guard has seen aligns what it loads
            optimizer.step()
        optimizer.load_state_dict(nhwc.contiguous_state_dict(optimizer.state_dict()))
    assert nhwc.check(model, plan, optimizer=[first, second]) != []
    aligned = nhwc.align_(model, [first, second])
    assert [(row.site, row.label) for row in aligned] == [
        ("block.weight", "exp_avg"),
        ("block.weight", "exp_avg_sq"),
        ("volume.weight", "momentum_buffer"),
    ]
    assert nhwc.check(model, plan, optimizer=[first, second]) == []


def test_align_refuses_an_optimizer_of_another_model():
    model, _ = converted()
    with pytest.raises(ValueError, match="the SGD holds none of the model's parameters"):
        nhwc.align_(model, torch.optim.SGD(network().parameters()))
