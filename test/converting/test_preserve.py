"""`preserve=True`: layers are planned, replaced, reported, checked and restored with the weights."""

import copy

import pytest
import torch
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import Plan, Reason
from torch_nhwc.nn.replacements import is_preserving
from torch_nhwc.planning import Action

CL = torch.channels_last
STOCK = [nn.Conv2d, nn.GroupNorm, nn.ReLU, nn.Conv2d, nn.GroupNorm]


def network():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.GroupNorm(1, 4)
    )


def types(model):
    return [type(module) for module in model]


def is_replaced(model):
    return [type(model[index]).__name__ for index in (1, 4)] == ["PreservingGroupNorm"] * 2


class TestPlan:
    """The layers of a plan."""

    def test_has_a_row_for_each_layer_and_writes_nothing(self):
        model = network()
        plan = nhwc.plan(model, preserve=True)
        assert [row[:2] + row[3:] for row in plan.layers] == [
            ("1", "GroupNorm", Action.EXCHANGE, None),
            ("4", "GroupNorm", Action.EXCHANGE, None),
        ]
        assert all("accuracy" in row.loses for row in plan.layers)
        assert types(model) == STOCK
        assert not nhwc.plan(model).layers

    def test_applies_to_another_instance(self):
        plan, model = nhwc.plan(network(), preserve=True, filter_fn=lambda module, path: path != "4"), network()
        report = nhwc.convert_(model, plan=Plan.from_json(plan.to_json()))
        assert [type(model[index]).__name__ for index in (1, 4)] == ["PreservingGroupNorm", "GroupNorm"]
        assert [row.reason for row in report.plan.layers] == [None, Reason.FILTERED]
        assert report.plan.digest == plan.digest

    def test_a_model_whose_layers_differ_raises(self):
        plan = nhwc.plan(network(), preserve=True)
        other, missing, more = network(), network(), network()
        other[1] = nn.InstanceNorm2d(6)
        missing[4] = nn.Identity()
        more.append(nn.GELU())
        for model, message in (
            (other, "it has a InstanceNorm2d at '1', the plan a GroupNorm"),
            (missing, "it has no such layer at '4', the plan a GroupNorm"),
            (more, r"the plan does not know '5' \(GELU\)"),
        ):
            before = types(model)
            for call in (lambda model: nhwc.convert_(model, plan=plan), lambda model: nhwc.check(model, plan)):
                with pytest.raises(ValueError, match=message):
                    call(model)
            assert types(model) == before


class TestConvert:
    """Replacing layers and restoring them."""

    def test_a_second_call_changes_nothing(self):
        model = network()
        nhwc.convert_(model, preserve=True)
        before = types(model)
        report = nhwc.convert_(model, preserve=True)
        assert types(model) == before
        assert [row.reason for row in report.plan.layers] == [Reason.EXCHANGED] * 2
        assert Reason.SAVED_WHOLE.value not in report.remarks
        report.revert()
        assert types(model) == before
        nhwc.convert_(model)
        assert types(model) == before

    def test_revert_and_the_context_restore_the_classes(self):
        model = network()
        nhwc.convert_(model, preserve=True).revert()
        assert types(model) == STOCK
        with nhwc.channels_last(model, preserve=True):
            assert is_replaced(model)
        assert types(model) == STOCK

    def test_averaged_copies_are_replaced_and_restored(self):
        model = network()
        averaged = torch.optim.swa_utils.AveragedModel(model)
        report = nhwc.convert_(model, ema=averaged, preserve=True)
        assert is_replaced(averaged.module)
        later = copy.deepcopy(model)
        report.revert(ema=later)
        assert types(model) == types(averaged.module) == types(later) == STOCK


def lazy_convolution():
    return nn.Sequential(nn.Conv3d(3, 4, 1), nn.GELU(), nn.LazyConv3d(4, 1)), torch.randn(1, 3, 4, 4, 4)


def lazy_norm():
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.LazyInstanceNorm2d(affine=True), nn.GELU()), torch.randn(1, 3, 4, 4)


@pytest.mark.parametrize("make", [lazy_convolution, lazy_norm])
def test_lazy_layers_stay_as_they_are(make):
    model, x = make()
    with nhwc.channels_last(model, preserve=True) as report:
        (lazy,) = (row for row in report.plan.layers if row.reason is Reason.LAZY_LAYER)
        assert lazy.action is Action.KEEP
        model(x)
        assert type(model[int(lazy.path)]).__name__ == lazy.layer
        assert not nhwc.check(model, report.plan)
        nhwc.training.restore_(model, report.plan)
        assert [row.action for row in nhwc.plan(model, preserve=True).layers if row.path == lazy.path] == ["exchange"]
    assert not any(is_preserving(type(layer)) for layer in model)
