"""Reports: what was done, why, and how it reads."""

import copy
import warnings

import pytest
import torch
from snapshots import assert_unchanged, network, refused_view, snapshot
from torch import nn
from torch.nn.utils import parametrizations

import torch_nhwc as nhwc
from torch_nhwc import Outcome, Reason, Report


def test_a_report_has_the_outcome_of_every_site():
    model = network()
    held = model["volume"].weight.detach()
    model["blocks"].share_memory()
    with pytest.warns(UserWarning, match="'blocks.1.weight' will no longer be in shared memory"):
        report = nhwc.convert_(model)
    assert report.outcomes == (Outcome.IN_PLACE, Outcome.RESTRIDED, Outcome.COPIED_SHARED, Outcome.COPIED_HELD)
    assert [row.outcome for row in report.rows] == list(report.outcomes)
    assert report.new_bytes == model["blocks"][1].weight.nbytes + held.nbytes
    assert held.stride() == (18, 9, 9, 3, 1)
    assert set(nhwc.convert_(model).outcomes) == {Outcome.UNCHANGED}


def trained():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.GroupNorm(2, 4), nn.LazyConv2d(4, 3))
    optimizer = torch.optim.SGD(model[:2].parameters(), lr=0.1, momentum=0.9)
    model[:2](torch.randn(1, 3, 8, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_a_report_survives_json_and_then_belongs_to_no_model():
    model, optimizer = trained()
    report = nhwc.convert_(model, optimizer=optimizer, preserve=True, input_format="channels_last")
    read = Report.from_json(report.to_json())
    assert read == report
    assert read.plan.input_format == "channels_last"
    assert read.outcomes == report.outcomes
    assert {row.label for row in read.companions} == {"grad", "momentum_buffer"}
    assert str(read) == str(report)
    assert read.model is None
    with pytest.raises(RuntimeError, match="belongs to no model: only the original can revert"):
        read.revert()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"plan"', '"other"'),
        ('"IN_PLACE"', '"BURNT"'),
        ('"channels_last"', '"nhwc"'),
        ('"new_bytes": 0', '"new_bytes": ""'),
    ],
)
def test_text_that_is_no_report_raises(old, new):
    text = nhwc.convert_(nn.Conv2d(3, 4, 3), input_format="channels_last").to_json()
    assert old in text
    with pytest.raises(ValueError, match=r"expected what Report\.to_json writes"):
        Report.from_json(text.replace(old, new))


def three(*more):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3), *more)


def tied():
    model = three(nn.Conv2d(4, 4, 3))
    model[3].weight = model[2].weight
    return model


def swapped():
    model = three()
    nhwc.convert_(model[0], each_forward=True)
    return model


TO_MOVE, MOVED = "2 to move (1.0 kB), 1 to restride", "2 moved (1.0 kB), 1 restrided"
# A model, the options, and what a plan and a report say.
SUMMARIES = {
    "plain": (three, {}, f"3 weights to channels-last: {TO_MOVE}", f"3 weights to channels-last: {MOVED}"),
    "in format": (three, {"memory_format": "contiguous_format"}, "3 weights to contiguous: 3 in format already", None),
    "tied": (tied, {}, f"4 weights to channels-last: {TO_MOVE}, 1 tied to another", None),
    "filtered": (
        three,
        {"filter_fn": lambda module, path: path == "0"},
        "3 weights to channels-last: 1 to move (432 bytes), 2 left out by the filter",
        None,
    ),
    "rank": (
        network,
        {"memory_format": "channels_last"},
        f"4 weights to channels-last: {TO_MOVE}, 1 of the other rank",
        None,
    ),
    "lazy": (lambda: nn.LazyConv2d(3, 3), {}, "1 weight to channels-last: 1 once they have a shape", None),
    "refused": (lambda: three(refused_view()), {}, f"4 weights to channels-last: {TO_MOVE}, 1 refused", None),
    "meta": (lambda: three().to("meta"), {}, "3 weights to channels-last: 3 on the meta device", None),
    "in each forward": (swapped, {"each_forward": True}, "3 weights to channels-last: 3 in each forward", None),
    "one channel": (
        lambda: nn.Conv2d(1, 4, 3),
        {},
        "1 weight to channels-last: 1 of one channel stay contiguous",
        None,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch_nhwc")
@pytest.mark.parametrize("name", SUMMARIES)
def test_plans_and_reports_begin_with_what_happens_to_how_many_weights(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    make, options, planned, done = SUMMARIES[name]
    model = make()
    plan = nhwc.plan(model, **options)
    done = done or planned.replace(TO_MOVE, MOVED).replace("to move", "moved")
    report = nhwc.convert_(model, **options)
    assert (repr(plan), repr(report)) == (f"<Plan: {planned}>", f"<Report: {done}>")
    assert (str(plan).splitlines()[0], str(report).splitlines()[0]) == (f"{planned}.", f"{done}.")


def test_a_model_without_convolutions_is_said_to_have_none():
    model = nn.Linear(3, 3)
    with pytest.warns(UserWarning, match="in the Linear: no 2D or 3D convolution was found. Modules that call"):
        report = nhwc.convert_(model)
    assert "pass example_inputs" in str(report)
    assert report.table() == ""
    report.revert()
    plan = nhwc.plan(model, example_inputs=torch.randn(2, 3))
    assert str(plan) == str(nhwc.Plan.from_json(plan.to_json())) == "No 2D or 3D convolution was found.\n"


def test_what_needs_a_look_is_named_below(monkeypatch):
    class Own(nn.GELU):
        def forward(self, x):
            return x.relu()

    monkeypatch.setenv("COLUMNS", "300")
    model = nn.ModuleDict({"stem": nn.Conv2d(3, 64, 7), "view": refused_view(), "gelu": nn.GELU(), "own": Own()})
    model["norm"] = parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    model["stem"].weight.grad = torch.zeros(64, 3, 7, 7)
    held = model.eval()["stem"].weight.detach()
    with pytest.warns(UserWarning, match="1 of 4 sites"):
        report = nhwc.convert_(model, optimizer=(), ema=copy.deepcopy(model), preserve=True)
    assert str(report).splitlines()[:-2] == [
        "4 weights to channels-last: 2 moved (38.1 kB), 1 in format already, 1 refused.",
        f"1 refused, PART_OF_LARGER_STORAGE: {Reason.PART_OF_LARGER_STORAGE.value}",
        "  view  Conv2d  4x3x3x3",
        f"2 with a remark, COPIED_EACH_FORWARD: {Reason.COPIED_EACH_FORWARD.value}",
        "  norm.parametrizations.weight.original0  ParametrizedConv2d  4x1x1x1",
        "  norm.parametrizations.weight.original1  ParametrizedConv2d  4x3x3x3",
        "3 Conv2d replaced: right for every shape, and fast where PyTorch's kernels are slow on this CPU, 3x3 "
        "with fewer multiplications",
        "1 GELU replaced: fast, forward and backward",
        f"1 Own kept (own): {Reason.OTHER_CLASS.value}",
        "Moved: 1 in place, 1 to new storage (something else holds the old one).",
        "With the strides of their weights: 1 grad, 3 ema.",
        Reason.SAVED_WHOLE.value,
    ]
    assert held.is_contiguous()
    assert f"1 GELU kept: {Reason.EXCHANGED.value}" in str(nhwc.plan(model, preserve=True)).splitlines()


def test_the_table_has_all_rows(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    model = nn.ModuleDict({"stem": nn.Conv2d(3, 64, 7), "block": nn.Sequential(nn.Conv2d(64, 64, 1), nn.GELU())})
    model["view"] = refused_view()
    model["view"].weight = nn.Parameter(torch.randn(216).half()[108:].view(4, 3, 3, 3))
    model["later"] = nn.LazyConv2d(3, 3)
    with pytest.warns(UserWarning, match="1 of 4 sites"):
        report = nhwc.convert_(model)
    lines = report.table().splitlines()
    assert lines[:11] == [
        "site     layer       shape      dtype    action    reason",
        "stem     Conv2d      64x3x7x7   float32  in place",
        "block.0  Conv2d      64x64x1x1  float32  restride",
        "view     Conv2d      4x3x3x3    float16  refuse    PART_OF_LARGER_STORAGE",
        "later    LazyConv2d                      convert   LAZY",
        "layer    class   action    reason",
        "stem     Conv2d  exchange",
        "block.0  Conv2d  exchange",
        "block.1  GELU    exchange",
        "view     Conv2d  exchange",
        "later    Conv2d  keep      LAZY_LAYER",
    ]
    reasons = ["PART_OF_LARGER_STORAGE", "LAZY", "LAZY_LAYER"]
    assert [line.split(":")[0] for line in lines[11:] if not line.startswith(" ")] == reasons
    assert Reason.LAZY.value[:20] not in nhwc.plan(model, "contiguous_format").table()  # nothing will be converted


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_plans_and_reports_fit_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    model = nn.Sequential()
    part = model
    for name in ("encoder", "stages_of_the_encoder", "0", "shortcut_of_the_residual_block"):
        part.add_module(name, nn.Sequential(nn.Conv2d(512, 512, 1, device="meta"), refused_view()))
        part = part.get_submodule(name)
    part.add_module("norm", parametrizations.weight_norm(nn.Conv2d(3, 4, 3).half()))
    part.add_module("lazy", nn.LazyConvTranspose3d(4, 3))
    plan = nhwc.plan(model)
    with pytest.warns(UserWarning, match="stay as they are"):
        report = nhwc.convert_(model)
    for text in (str(plan), str(report), plan.table(), report.table()):
        assert max(map(len, text.splitlines())) <= columns


@pytest.mark.parametrize(
    ("layer", "requested", "instead"),
    [(nn.Conv3d, "channels_last", "channels_last_3d"), (nn.Conv2d, torch.channels_last_3d, "channels_last")],
)
def test_nothing_to_convert_is_a_warning_and_an_error_if_strict(layer, requested, instead):
    model = nn.Sequential(layer(3, 4, 3))
    before = snapshot(model)
    rank, other = model[0].weight.dim() - 2, str(requested).removeprefix("torch.")
    message = (
        f"nothing to convert in the Sequential: its convolutions are {rank}D: pass '{instead}', or no format, instead "
        f"of '{other}'"
    )
    plan = nhwc.plan(model, requested)
    for convert in (
        lambda **options: nhwc.convert_(model, plan=plan, **options),
        lambda **options: nhwc.convert_(model, requested, input_format="channels_last", **options),
    ):
        with pytest.raises(RuntimeError, match=f"{message} \\(nothing was changed, since strict=True\\)"):
            convert(strict=True)
        assert_unchanged(model, before)
        assert not model._forward_pre_hooks
        with pytest.warns(UserWarning, match=f"{message}$") as warned:
            convert().revert()
        assert [each.filename for each in warned] == [__file__]
    assert_unchanged(model, before)


def test_there_is_no_warning_if_layers_are_replaced_or_weights_are_left_out_on_purpose():
    model = nn.Sequential(nn.GELU())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # the second time they are replaced already
            nhwc.convert_(model, preserve=True, strict=True)
        nhwc.convert_(model, torch.contiguous_format, strict=True)
        assert type(model[0]) is nn.GELU
        nhwc.convert_(nn.Conv2d(3, 3, 3), filter_fn=lambda module, path: False, strict=True)
        nhwc.convert_(network(), "channels_last", strict=True)
        nhwc.convert_conv2d_weight_memory_format(nn.Conv3d(3, 3, 3), torch.channels_last)  # as PyTorch's


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv2d(3, 8, 3),
        lambda: nn.Conv2d(8, 8, 1),
        lambda: nn.Conv2d(1, 8, 3),
        lambda: nn.Conv2d(8, 8, 3, groups=8, bias=False),
        lambda: nn.ConvTranspose3d(4, 6, 2).requires_grad_(False),
        lambda: nn.Conv3d(4, 6, 3).to(memory_format=torch.channels_last_3d),
        lambda: nn.Conv2d(3, 8, 3, device="meta"),
    ],
)
def test_one_layer_gets_the_report_that_it_gets_inside_of_a_walk(make):
    """A layer alone is converted without the walk; a filter that leaves nothing out requires one."""
    alone, walked = make(), make()
    report, of_walk = nhwc.convert_(alone), nhwc.convert_(walked, filter_fn=lambda *_: True)
    assert report.plan == of_walk.plan
    assert report.plan.digest == of_walk.plan.digest
    assert (report.outcomes, report.remarks) == (of_walk.outcomes, of_walk.remarks)
    assert (report.companions, report.new_bytes) == (of_walk.companions, of_walk.new_bytes)
    assert type(alone) is type(walked)
    assert alone.weight.stride() == walked.weight.stride()
    for layer, each in ((alone, report), (walked, of_walk)):
        each.revert()
        assert type(layer) is type(make())
        assert layer.weight.stride() == make().weight.stride()
