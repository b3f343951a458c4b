"""Reports: what was done, why, and how it reads."""

import copy
import re
import warnings

import pytest
import torch
from snapshots import assert_unchanged, in_format, network, refused_view, snapshot
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


TO_CONVERT, CONVERTED = "3 to convert (1.0 kB)", "3 converted (1.0 kB)"
# A model, the options, and what a plan and a report say.
SUMMARIES = {
    "plain": (three, {}, f"3 weights to channels-last: {TO_CONVERT}", f"3 weights to channels-last: {CONVERTED}"),
    "in format": (three, {"memory_format": "contiguous_format"}, "3 weights to contiguous: 3 in format already", None),
    "tied": (tied, {}, f"4 weights to channels-last: {TO_CONVERT}, 1 tied to another", None),
    "filtered": (
        three,
        {"filter_fn": lambda module, path: path == "0"},
        "3 weights to channels-last: 1 to convert (432 bytes), 2 left out by the filter",
        None,
    ),
    "rank": (
        network,
        {"memory_format": "channels_last"},
        f"4 weights to channels-last: {TO_CONVERT}, 1 of the other rank",
        None,
    ),
    "lazy": (lambda: nn.LazyConv2d(3, 3), {}, "1 weight to channels-last: 1 waiting for a shape", None),
    "refused": (lambda: three(refused_view()), {}, f"4 weights to channels-last: {TO_CONVERT}, 1 refused", None),
    "meta": (
        lambda: three().to("meta"),
        {},
        "3 weights to channels-last: 3 on the meta device (convert after loading the weights)",
        None,
    ),
    "in each forward": (swapped, {"each_forward": True}, "3 weights to channels-last: 3 in each forward", None),
    "one channel": (
        lambda: nn.Conv2d(1, 4, 3),
        {},
        "1 weight to channels-last: 1 left contiguous (one channel)",
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
    done = done or planned.replace("to convert", "converted")
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
    with pytest.warns(UserWarning, match="1 of 4 weights refused"):
        report = nhwc.convert_(model, optimizer=(), ema=copy.deepcopy(model), preserve=True)
    assert str(report).splitlines() == [
        "4 weights to channels-last: 2 converted (38.1 kB), 1 in format already, 1 refused.",
        f"1 refused, PART_OF_LARGER_STORAGE: {Reason.PART_OF_LARGER_STORAGE.value}",
        "  view  Conv2d  4x3x3x3",
        f"2 with a remark, COPIED_EACH_FORWARD: {Reason.COPIED_EACH_FORWARD.value}",
        "  norm.parametrizations.weight.original0  ParametrizedConv2d  4x1x1x1",
        "  norm.parametrizations.weight.original1  ParametrizedConv2d  4x3x3x3",
        "3 Conv2d replaced: right for every shape, fast where PyTorch is slow, also by fewer multiplications",
        "1 GELU replaced: fast, forward and backward",
        f"1 Own kept (own): {Reason.OTHER_CLASS.value}",
        "Following their weights: 1 grad, 3 ema.",
        "37.6 kB of new storage: 1 weight (something else holds the old one).",
        Reason.SAVED_STRIDES.value,
        Reason.SAVED_WHOLE.value,
        "(All rows: .table())",
    ]
    assert held.is_contiguous()
    assert f"1 GELU kept: {Reason.REPLACED.value}" in str(nhwc.plan(model, preserve=True)).splitlines()


def test_the_table_has_all_rows(monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    model = nn.ModuleDict({"stem": nn.Conv2d(3, 64, 7), "block": nn.Sequential(nn.Conv2d(64, 64, 1), nn.GELU())})
    model["view"] = refused_view()
    model["view"].weight = nn.Parameter(torch.randn(216).half()[108:].view(4, 3, 3, 3))
    model["later"] = nn.LazyConv2d(3, 3)
    with pytest.warns(UserWarning, match="1 of 4 weights refused"):
        report = nhwc.convert_(model)
    lines = report.table().splitlines()
    assert lines[:11] == [
        "weight   layer       shape      dtype    action                  reason",
        "stem     Conv2d      64x3x7x7   float32  convert",
        "block.0  Conv2d      64x64x1x1  float32  convert (strides only)",
        "view     Conv2d      4x3x3x3    float16  refuse                  PART_OF_LARGER_STORAGE",
        "later    LazyConv2d                      convert                 LAZY",
        "layer    class   action   reason",
        "stem     Conv2d  replace",
        "block.0  Conv2d  replace",
        "block.1  GELU    replace",
        "view     Conv2d  replace",
        "later    Conv2d  keep     LAZY_LAYER",
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
    with pytest.warns(UserWarning, match="refused"):
        report = nhwc.convert_(model)
    for text in (str(plan), str(report), plan.table(), report.table()):
        assert max(map(len, text.splitlines())) <= columns


def assert_is_in_vain(model, message, converts=False, **options):
    """Assert that a call of `plan` or `convert_` does nothing, warns, says so in its text, and raises if strict."""
    before, types = snapshot(model), [*map(type, model.modules())]
    in_text = re.sub("in the [A-Z]\\w+", "in the model", message)
    with pytest.warns(UserWarning, match=f"{re.escape(message)}$") as warned:
        plan = nhwc.plan(model, **options)
    assert in_text in str(plan)
    for given in ({"plan": plan}, options):
        with pytest.raises(RuntimeError, match=f"{re.escape(message)} .nothing was changed, since strict=True"):
            nhwc.convert_(model, **given, strict=True)
        assert_unchanged(model, before)
        with pytest.warns(UserWarning, match=f"{re.escape(message)}$") as warned_again:
            report = nhwc.convert_(model, **given)
        assert in_text in str(report)
        assert [each.filename for each in (*warned, *warned_again)] == [__file__] * 2
        assert not model._forward_pre_hooks
        if converts:
            assert any(in_format(model).values())
            report.revert()
        assert_unchanged(model, before)
        assert [*map(type, model.modules())] == types


@pytest.mark.parametrize(
    ("layer", "requested", "instead"),
    [(nn.Conv3d, "channels_last", "channels_last_3d"), (nn.Conv2d, torch.channels_last_3d, "channels_last")],
)
@pytest.mark.parametrize("options", [{"input_format": "channels_last"}, {"each_forward": True}], ids=str)
def test_a_memory_format_of_the_other_rank_changes_nothing_and_the_right_one_is_named(
    layer, requested, instead, options, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "300")
    model = nn.Sequential(layer(3, 4, 3), nn.GroupNorm(2, 4), nn.GELU())
    rank, other = model[0].weight.dim() - 2, str(requested).removeprefix("torch.")
    message = (
        f"nothing to convert in the Sequential: its convolutions are {rank}D: omit memory_format, or pass '{instead}' "
        f"instead of '{other}'"
    )
    assert_is_in_vain(model, message, memory_format=requested, **options)


@pytest.mark.parametrize("memory_format", [None, torch.contiguous_format], ids=str)
def test_a_filter_that_leaves_out_every_convolution_is_told_their_paths(memory_format, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    model = nn.ModuleDict({"encoder": network(), "decoder": nn.GELU()})
    message = (
        "nothing to convert in the ModuleDict: filter_fn returns false for all 4 of its convolutions: "
        "'encoder.first', 'encoder.blocks.0', 'encoder.blocks.1' and 1 more"
    )
    assert_is_in_vain(model, message, memory_format=memory_format, filter_fn=lambda _, path: path.startswith("encodr"))
    alone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv3d(3, 4, 3))
    message = "in the Sequential: filter_fn returns false for its only convolution: '0'"
    assert_is_in_vain(alone, message, memory_format="channels_last", filter_fn=lambda *_: False)


def test_a_filter_for_norms_alone_is_not_in_vain():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))
    report = nhwc.convert_(model, filter_fn=lambda module, _: isinstance(module, nn.GroupNorm), strict=True)
    assert [row.layer for row in report.plan.layers if row.is_wanted] == ["GroupNorm"]


def test_convolutions_that_wait_for_a_shape_are_told_how_to_get_one():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyConv2d(4, 3))
    message = "all 2 of its convolutions wait for a shape, which a call of the model gives: '0', '1'"
    with pytest.warns(UserWarning, match=f"nothing to convert in the Sequential: {message}"):
        nhwc.convert_(model)
    with pytest.raises(RuntimeError, match=message):
        nhwc.convert_(model, strict=True)


def test_an_input_format_of_the_other_rank_is_named_with_the_right_one(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    message = (
        "input_format='channels_last_3d' converts no inputs, since the convolutions are 2D: pass 'channels_last', "
        "which is for images and volumes alike"
    )
    assert_is_in_vain(model, message, converts=True, input_format="channels_last_3d")
    options = {"memory_format": "channels_last", "input_format": torch.channels_last_3d}
    assert_is_in_vain(network(), message, converts=True, **options)


def test_channels_last_is_the_input_format_of_volumes_as_well():
    model = nn.Sequential(nn.Conv3d(3, 4, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nhwc.convert_(model, input_format="channels_last", strict=True)
    assert model(torch.randn(2, 3, 4, 4, 4)).is_contiguous(memory_format=torch.channels_last_3d)


def test_there_is_no_warning_if_layers_are_replaced_or_the_model_has_both_ranks():
    model = nn.Sequential(nn.GELU())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # the second time they are replaced already
            nhwc.convert_(model, preserve=True, strict=True)
        nhwc.convert_(model, torch.contiguous_format, strict=True)
        assert type(model[0]) is nn.GELU
        both = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU())
        nhwc.convert_(both)
        nhwc.convert_(both, torch.contiguous_format, filter_fn=lambda module, path: path == "1", strict=True)
        assert (both[0].weight.is_contiguous(), type(both[1])) == (False, nn.GELU)
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
