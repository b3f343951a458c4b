"""`preserve=True`: layers are planned, exchanged, reported on, checked and brought back with the weights."""

import copy
import json

import pytest
import torch
from reference import FORMATS, canonical_strides
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import Plan, Reason
from torch_nhwc.planning import Action

CL = torch.channels_last
STOCK = [nn.Conv2d, nn.GroupNorm, nn.ReLU, nn.Conv2d, nn.GroupNorm]


def network():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.GroupNorm(1, 4)
    )


def types(model):
    return [type(module) for module in model]


def is_exchanged(model):
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

    def test_its_json_comes_back_and_the_digest_covers_the_layers(self):
        model = network()
        plan, without = nhwc.plan(model, preserve=True), nhwc.plan(model)
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.digest != without.digest
        changed = json.loads(plan.to_json())
        changed["layers"][0]["action"] = "KEEP"
        with pytest.raises(ValueError, match="the digest does not fit the rows"):
            Plan.from_json(json.dumps(changed))

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
    """Exchanging and bringing back."""

    def test_activations_and_gradients_stay_in_channels_last(self):
        model, x = network(), torch.randn(2, 3, 8, 8)
        expected = copy.deepcopy(model)(x)
        nhwc.convert_(model, preserve=True, input_format="channels_last")
        assert is_exchanged(model)
        seen = []
        model[1].register_full_backward_hook(lambda _, inputs, outputs: seen.extend([*inputs, *outputs]))
        output = model(x)
        torch.testing.assert_close(output, expected)
        assert output.stride() == canonical_strides(output.shape, CL)
        output.square().sum().backward()
        assert all(each.stride() == canonical_strides(each.shape, CL) for each in seen)

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

    def test_revert_and_the_context_bring_the_classes_back(self):
        model = network()
        nhwc.convert_(model, preserve=True).revert()
        assert types(model) == STOCK
        with nhwc.channels_last(model, preserve=True):
            assert is_exchanged(model)
        assert types(model) == STOCK

    def test_contiguous_brings_them_back_and_its_report_exchanges_them_again(self):
        model = network()
        nhwc.convert_(model, preserve=True)
        report = nhwc.convert_(model, torch.contiguous_format)
        assert types(model) == STOCK
        report.revert()
        assert is_exchanged(model)

    def test_averaged_copies_are_exchanged_and_brought_back(self):
        model = network()
        averaged = torch.optim.swa_utils.AveragedModel(model)
        report = nhwc.convert_(model, ema=averaged, preserve=True)
        assert is_exchanged(averaged.module)
        later = copy.deepcopy(model)
        report.revert(ema=later)
        assert types(model) == types(averaged.module) == types(later) == STOCK

        nhwc.convert_(model, preserve=True)
        nhwc.convert_(model, ema=averaged, preserve=True)
        assert is_exchanged(averaged.module)
        nhwc.convert_(model, torch.contiguous_format, ema=averaged)
        assert types(averaged.module) == STOCK


class TestRemarks:
    """What a report says of the whole model."""

    @pytest.mark.parametrize("norm", [nn.GroupNorm(2, 6), nn.InstanceNorm2d(6)], ids=lambda norm: type(norm).__name__)
    def test_norms_that_stay_as_they_are_are_a_remark(self, norm):
        reason = Reason.GROUP_NORM if isinstance(norm, nn.GroupNorm) else Reason.INSTANCE_NORM

        def remarks(**options):
            return nhwc.convert_(nn.Sequential(nn.Conv2d(3, 6, 3), copy.deepcopy(norm)), **options).remarks

        assert remarks() == (reason.value,)
        assert remarks(preserve=True) == (Reason.SAVED_WHOLE.value,)
        keep = {"filter_fn": lambda module, _: isinstance(module, nn.Conv2d)}
        assert remarks(preserve=True, **keep) == (reason.value,)
        model = nn.Sequential(nn.Conv2d(3, 6, 3), copy.deepcopy(norm))
        nhwc.convert_(model, preserve=True, filter_fn=lambda module, _: not isinstance(module, nn.Conv2d))
        assert not nhwc.convert_(model).remarks


class TestWithOthers:
    """What else is done with layers."""

    def test_models_with_example_inputs_show_the_weights_of_exchanged_convolutions(self):
        model = nn.Sequential(nn.Conv3d(3, 6, 3), nn.Conv3d(6, 4, 1))
        x = torch.randn(2, 3, 6, 6, 6).contiguous(memory_format=FORMATS[5])
        nhwc.convert_(model, preserve=True)
        report = nhwc.convert_(model, preserve=True, example_inputs=x)
        assert [row.reason for row in report.plan.rows] == [Reason.IN_FORMAT] * 2
        scripted = torch.jit.script(copy.deepcopy(model))
        rows = nhwc.plan(scripted).rows
        assert [row.full_name for row in rows] == ["0.weight", "1.weight"]
        assert {row.reason for row in rows} == {Reason.IN_FORMAT}
