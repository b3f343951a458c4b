"""`preserve=True`: layers are planned, replaced, reported, checked and restored with the weights."""

import pytest
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import Plan, Reason
from torch_nhwc.planning import Action

STOCK = [nn.Conv2d, nn.GroupNorm, nn.ReLU, nn.Conv2d, nn.GroupNorm]


def network():
    layers = nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.GroupNorm(1, 4)
    return nn.Sequential(*layers)


def types(model):
    return [type(module) for module in model]


def is_replaced(model):
    return [type(model[index]).__name__ for index in (1, 4)] == ["PreservingGroupNorm"] * 2


class TestPlan:
    """The layers of a plan."""

    def test_has_a_row_for_each_layer_and_writes_nothing(self):
        model = network()
        plan = nhwc.plan(model)
        assert [row[:2] + row[3:] for row in plan.layers] == [
            ("0", "Conv2d", Action.EXCHANGE, None),
            ("1", "GroupNorm", Action.EXCHANGE, None),
            ("3", "Conv2d", Action.EXCHANGE, None),
            ("4", "GroupNorm", Action.EXCHANGE, None),
        ]
        assert all(("accurate" if row.layer == "GroupNorm" else "right") in row.gains for row in plan.layers)
        assert types(model) == STOCK
        assert not nhwc.plan(model, preserve=False).layers

    def test_applies_to_another_instance(self):
        plan, model = nhwc.plan(network(), filter_fn=lambda module, path: path != "4"), network()
        report = nhwc.convert_(model, plan=Plan.from_json(plan.to_json()))
        assert [type(model[index]).__name__ for index in (1, 4)] == ["PreservingGroupNorm", "GroupNorm"]
        assert [row.reason for row in report.plan.layers] == [None, None, None, Reason.FILTERED]
        assert report.plan.digest == plan.digest

    def test_a_model_whose_layers_differ_raises(self):
        plan = nhwc.plan(network())
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
        nhwc.convert_(model)
        before = types(model)
        report = nhwc.convert_(model)
        assert types(model) == before
        assert [row.reason for row in report.plan.layers] == [Reason.EXCHANGED] * 4
        assert Reason.SAVED_WHOLE.value not in report.remarks
        report.revert()
        assert types(model) == before
        nhwc.convert_(model, preserve=False)
        assert types(model) == before

    def test_revert_and_the_context_restore_the_classes(self):
        model = network()
        nhwc.convert_(model).revert()
        assert types(model) == STOCK
        with nhwc.channels_last(model):
            assert is_replaced(model)
        assert types(model) == STOCK
