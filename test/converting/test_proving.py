"""`convert_(..., verify=example_inputs)`: what differs stays as it is, the report says so, the rest converts."""

import copy
import warnings

import pytest
import torch
from comparison import layouts
from planted_faults import Scrambled
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import Action, Plan, Reason
from torch_nhwc.preserving.layers import PreservingGroupNorm

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def network(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Conv2d(8, 4, 3))


def converted(model, **options):
    """The report of a conversion, and the words of its one warning."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        report = nhwc.convert_(model, verify=X, input_format="channels_last", **options)
    (warning,) = warned
    assert warning.filename == __file__
    return report, str(warning.message)


def test_where_nothing_differs_the_report_has_the_verification_and_nothing_else_changes():
    model, plain = network(nn.ReLU(inplace=True)), network(nn.ReLU(inplace=True))
    report = nhwc.convert_(model, verify=X)
    assert report.verification.ok
    assert report.remarks == ()
    assert report.plan == nhwc.convert_(plain).plan
    assert layouts_of(model) == layouts_of(plain)
    assert nhwc.convert_(network()).verification is None


def layouts_of(model):
    return [parameter.stride() for parameter in model.parameters()]


def test_a_layer_that_differs_stays_and_the_rest_converts():
    model = network(nn.ReLU(), Scrambled(8, 8, 3, padding=1), nn.ReLU())
    reference, values = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report, warning = converted(model, optimizer=optimizer)
    assert [(row.path, row.action, row.reason) for row in report.plan.rows] == [
        ("0", Action.CONVERT, None),
        ("2", Action.KEEP, Reason.DIFFERS),
        ("4", Action.CONVERT, None),
    ]
    assert model[2].weight.is_contiguous()
    assert model[0].weight.stride() == (27, 1, 9, 3)
    (remark,) = (each for each in report.remarks if each.startswith("verify:"))
    assert remark.startswith("verify: '2' (Scrambled) differs: output by ")
    assert remark.endswith("it stays as it was")
    assert remark in warning
    assert Reason.DIFFERS.value in " ".join(str(report).split())
    assert report.verification.ok
    assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(model(X), reference(X))
    report.revert()
    assert layouts_of(model) == layouts_of(reference)


def test_an_exchanged_layer_that_differs_is_not_exchanged(monkeypatch):
    right = PreservingGroupNorm.forward
    monkeypatch.setattr(PreservingGroupNorm, "forward", lambda layer, x: right(layer, x) + 1)
    model = network(nn.GroupNorm(2, 8), nn.GELU())
    report, _ = converted(model, preserve=True)
    assert [(row.path, row.action, row.reason) for row in report.plan.layers] == [
        ("1", Action.KEEP, Reason.DIFFERS),
        ("2", Action.EXCHANGE, None),
    ]
    assert type(model[1]) is nn.GroupNorm
    # It is PyTorch's then, which is inaccurate itself.
    assert "'1' (GroupNorm) differs: output by 1, where" in report.remarks[-2]
    assert "would also without being converted" in report.remarks[-1]
    assert {row.path for row in report.verification.differing} == {"1"}


def test_weights_converted_in_each_forward_are_left_as_well():
    class Wrong(nn.Conv2d):
        def forward(self, x):
            return super().forward(x) + (type(self) is not Wrong)

    model = network(Wrong(8, 8, 3))
    report, _ = converted(model, each_forward=True)
    assert [row.action for row in report.plan.rows] == [Action.EACH_FORWARD, Action.KEEP, Action.EACH_FORWARD]
    assert type(model[1]) is Wrong


def test_code_around_layers_has_all_of_them_left():
    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.end = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 4)

        def forward(self, x):
            return self.end(self.conv(x).view(len(x), -1))

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.viewing, self.other = Viewing(), nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return self.viewing(x), self.other(x)

    torch.manual_seed(0)
    model = Both()
    with pytest.warns(UserWarning, match=r"'viewing' \(Viewing\) differs: forward by inf"):
        report = nhwc.convert_(model, verify=X)
    assert [row.reason for row in report.plan.rows] == [Reason.DIFFERS, None]
    model(X)
    # A channels-last input it does not take, converted or not.
    assert {(row.path, row.before_differs) for row in report.verification.differing} == {("viewing", True)}


def test_the_plan_keeps_what_differed_for_other_instances():
    report, _ = converted(network(Scrambled(8, 8, 3)))
    plan = Plan.from_json(report.plan.to_json())
    other = network(Scrambled(8, 8, 3))
    assert nhwc.convert_(other, plan=plan).plan == plan
    assert other[1].weight.is_contiguous()
    assert nhwc.check(other, plan) == []
    fresh = network(Scrambled(8, 8, 3))
    of_plan, _ = converted_by(fresh, nhwc.plan(fresh))
    assert of_plan.plan == plan


def converted_by(model, plan):
    with pytest.warns(UserWarning, match="stays as it was") as warned:
        return nhwc.convert_(model, plan=plan, verify=X), warned


def test_strict_and_dry_run_change_nothing():
    model = network(Scrambled(8, 8, 3))
    layout = layouts(model)
    with pytest.raises(RuntimeError, match=r"'1' \(Scrambled\) differs: .*nothing was changed, since strict=True"):
        nhwc.convert_(model, verify=X, strict=True)
    report, _ = converted(model, dry_run=True)
    assert [row.reason for row in report.plan.rows] == [None, Reason.DIFFERS, None]
    assert layouts(model) == layout


def test_the_model_stays_as_it_is_where_the_comparison_ends_early(monkeypatch):
    model = network(nn.ReLU())
    layout = layouts(model)
    with pytest.raises(RuntimeError, match="expected input"):
        nhwc.convert_(model, verify=torch.randn(2, 5, 8, 8))

    def interrupted(layer, x):
        raise KeyboardInterrupt

    monkeypatch.setattr(nn.ReLU, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        nhwc.convert_(model, verify=X)
    assert layouts(model) == layout
    model.lock = torch.Generator  # what is no tensor is copied
    model.scale = model[0].weight * 2
    with pytest.raises(RuntimeError, match="tried on a copy, and the model cannot be copied: Only Tensors created"):
        nhwc.convert_(model, verify=X)
    assert layouts(model) == layout


def test_the_choice_of_layers_is_made_on_the_model_itself():
    model = network(nn.Conv2d(8, 8, 3))
    report = nhwc.convert_(model, verify=X, filter_fn=lambda module, _: module is not model[1])
    assert [row.reason for row in report.plan.rows] == [None, Reason.FILTERED, None]


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_scripted_model_is_one_layer():
    model = torch.jit.script(network(nn.ReLU()))
    report = nhwc.convert_(model, verify=X)
    assert report.verification
    assert "gradient of 0.weight" in {row.what for row in report.verification.rows}
    assert layouts_of(model)[0] == (27, 1, 9, 3)
