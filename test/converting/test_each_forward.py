"""`convert_(each_forward=True)`: what is decided of every site, and plan, report, revert, check and restore."""

import copy

import pytest
import torch
from bare_kernel import Kernel
from snapshots import refused_view
from torch import nn
from user_code import not_a_leaf

import torch_nhwc as nhwc
from torch_nhwc import Plan, Reason
from torch_nhwc.planning import Action


class Standardised(nn.Conv2d):
    """Weight standardisation as in most repositories."""

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        std = weight.view(weight.size(0), -1).std(dim=1).view(-1, 1, 1, 1) + 1e-5
        return nn.functional.conv2d(x, weight / std, self.bias, self.stride, self.padding, self.dilation, self.groups)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Unflatten(1, (2, 2)), nn.Conv3d(2, 4, (1, 3, 3)))


@pytest.mark.parametrize("preserve", [True, False])
def test_a_weight_that_its_layer_views_stays_contiguous_and_what_is_computed_is_converted(preserve):
    model = nn.Sequential(Standardised(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), Standardised(8, 4, 1)).double()
    plain, x = copy.deepcopy(model), torch.randn(2, 3, 9, 9).double()
    report = nhwc.convert_(model, input_format="channels_last", preserve=preserve, strict=True)
    assert actions(report.plan) == [Action.EACH_FORWARD, Action.CONVERT, Action.EACH_FORWARD]
    for each in (model, plain):
        each(x).square().sum().backward()
    with nhwc.trace(model) as trace:
        torch.testing.assert_close(model(x), plain(x))
    assert "no loss, no mixed convolution" in str(trace)
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)
    assert model[0].weight.grad.is_contiguous()
    assert not nhwc.check(model, report.plan)
    report.revert()
    assert kinds(model) == kinds(plain)
    again = nhwc.convert_(model, plan=Plan.from_json(report.plan.to_json()), strict=True)
    assert actions(again.plan) == actions(report.plan)


def kinds(model):
    return [type(layer).__name__ for layer in model]


def actions(plan):
    return [row.action for row in plan.rows]


REPLACED = ["EachForwardConv2d", "GroupNorm", "Unflatten", "EachForwardConv3d"]
PLAIN = [name.removeprefix("EachForward") for name in REPLACED]


def test_a_plan_is_kept_compared_and_applied():
    model = network()
    plan = nhwc.plan(model, each_forward=True, preserve=False)
    assert actions(plan) == [Action.EACH_FORWARD] * 2
    assert plan.bytes_to_move == 0
    assert plan.each_forward is True
    assert kinds(model) == PLAIN
    read = Plan.from_json(plan.to_json())
    assert (read, read.digest, read.each_forward) == (plan, plan.digest, True)
    assert plan.digest != nhwc.plan(model, preserve=False).digest
    assert plan.digest != nhwc.plan(model, torch.contiguous_format).digest
    converted = network()
    nhwc.convert_(converted, preserve=False)
    assert nhwc.plan(converted, each_forward=True, preserve=False).digest == plan.digest
    other = network()
    report = nhwc.convert_(other, plan=read)
    assert kinds(other) == REPLACED
    assert report.plan == plan
    assert str(report).startswith("2 weights to channels-last: 2 in each forward.")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"each_forward": "keep"}, "expected each_forward to be True or False, got 'keep'"),
        ({"strict": "no"}, "expected strict to be True or False, got 'no'"),
        ({"each_forward": True, "memory_format": torch.contiguous_format}, "each_forward=True is for channels-last"),
        ({"each_forward": True, "plan": nhwc.plan(nn.Conv2d(3, 4, 3))}, "what to convert in each forward"),
    ],
)
def test_what_it_cannot_be(options, error):
    with pytest.raises(ValueError, match=error):
        nhwc.convert_(nn.Conv2d(3, 4, 3), **options)


def test_nothing_but_classes_changes_and_a_second_call_nothing():
    model = network()
    optimizer = torch.optim.LBFGS(model.parameters())
    tensors = [(id(p), p.data_ptr(), p.stride()) for p in model.parameters()]
    report = nhwc.convert_(model, optimizer=optimizer, each_forward=True, strict=True, preserve=False)
    assert report.companions == ()
    assert report.new_bytes == 0
    again = nhwc.convert_(model, each_forward=True, preserve=False)
    later = nhwc.convert_(model, preserve=False)
    for plan in (again.plan, later.plan):
        assert actions(plan) == [Action.KEEP] * 2
        assert {row.reason for row in plan.rows} == {Reason.IN_EACH_FORWARD}
    assert again.plan.digest == report.plan.digest
    assert [(id(p), p.data_ptr(), p.stride()) for p in model.parameters()] == tensors
    again.revert()
    assert kinds(model) == REPLACED
    report.revert()
    assert kinds(model) == PLAIN


def test_averaged_copies_and_tied_weights_go_along():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    model[1].weight = model[0].weight
    averaged = torch.optim.swa_utils.AveragedModel(model)
    other = copy.deepcopy(model)
    report = nhwc.convert_(model, ema=averaged, each_forward=True)
    assert actions(report.plan) == [Action.EACH_FORWARD] * 2
    assert kinds(model) == kinds(averaged.module) == ["EachForwardPreservingConv2d"] * 2
    nhwc.convert_(other, each_forward=True)
    report.revert(ema=other)
    assert kinds(model) == kinds(averaged.module) == kinds(other) == ["Conv2d"] * 2
    assert model[1].weight is model[0].weight


class Rebuilt(nn.Conv2d):
    def __reduce__(self):
        return Rebuilt, (3, 4, 3)


def replaced():
    layer = nn.Conv2d(3, 4, 3)
    layer.forward = layer.forward
    return layer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Kernel, Reason.NOT_REPLACEABLE),
        (replaced, Reason.NOT_REPLACEABLE),
        (lambda: Rebuilt(3, 4, 3), Reason.NOT_REPLACEABLE),
        (lambda: torch.jit.script(nn.Conv2d(3, 4, 3)), Reason.NOT_REPLACEABLE),
        (lambda: torch.compile(nn.Conv2d(3, 4, 3)), Reason.COMPILED),
        (refused_view, None),
        (not_a_leaf, None),
        (lambda: nn.Conv2d(3, 4, 3, device="meta"), None),
    ],
    ids=["raw", "replaced", "rebuilt", "scripted", "compiled", "part", "no_leaf", "meta"],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:torch_nhwc")
def test_what_is_refused_and_what_is_not(make, reason):
    model = make()
    example = {"example_inputs": torch.randn(1, 3, 5, 5)} if isinstance(model, Kernel) else {}
    (row,) = nhwc.convert_(model, each_forward=True, **example).plan.rows
    assert (row.action, row.reason) == (Action.REFUSE if reason else Action.EACH_FORWARD, reason)
