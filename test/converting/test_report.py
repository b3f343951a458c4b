"""Reports: what was done, why, and how it reads."""

import copy
import json
import pickle
import warnings

import pytest
import torch
from snapshots import assert_unchanged, network, refused_view, snapshot
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrizations

import torch_nhwc as nhwc
from torch_nhwc import Action, Outcome, Reason
from torch_nhwc.rendering import table


class TestReport:
    """What was done, and why."""

    def test_has_the_outcome_of_every_site(self):
        model = network()
        held = model["volume"].weight.detach()
        model["blocks"].share_memory()
        report = nhwc.convert_(model)
        assert report.outcomes == (
            Outcome.REUSED,
            Outcome.RESTRIDED,
            Outcome.FRESH_SHARED,
            Outcome.FRESH_HELD,
        )
        assert report.new_bytes == model["blocks"][1].weight.nbytes + held.nbytes
        assert report.seconds > 0
        assert held.stride() == (18, 9, 9, 3, 1)
        assert set(nhwc.convert_(model).outcomes) == {Outcome.KEPT}

    def test_becomes_json(self):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.randn(1, 3, 8, 8)).sum().backward()
        optimizer.step()
        report = nhwc.convert_(model, optimizer=optimizer)
        read = json.loads(report.to_json())
        assert read["digest"] == report.plan.digest
        assert [(row["path"], row["action"], row["outcome"]) for row in read["rows"]] == [
            ("0", "convert", "REUSED"),
            ("1", "restride", "RESTRIDED"),
        ]
        assert read["companions"][0] == {"site": "0.weight", "label": "grad", "outcome": "REUSED", "reason": None}
        assert {each["label"] for each in read["companions"]} == {"grad", "momentum_buffer"}
        assert (read["new_bytes"], read["dry_run"], read["remarks"]) == (0, False, [])

    def test_has_the_rows_of_the_plan_with_their_outcomes(self):
        model = network()
        report = nhwc.convert_(model)
        assert [(row.full_name, row.action, row.outcome) for row in report.rows] == [
            ("first.weight", Action.CONVERT, Outcome.REUSED),
            ("blocks.0.weight", Action.RESTRIDE, Outcome.RESTRIDED),
            ("blocks.1.weight", Action.CONVERT, Outcome.REUSED),
            ("volume.weight", Action.CONVERT, Outcome.REUSED),
        ]
        assert tuple(row._replace(outcome=None) for row in report.rows) == report.plan.rows
        assert {row.outcome for row in nhwc.convert_(model, dry_run=True).rows} == {None}
        assert "outcome" not in report.plan.to_json()

    def test_of_a_model_without_convolutions(self):
        model = nn.Linear(3, 3)
        with pytest.warns(UserWarning, match="in the Linear: no 2D or 3D convolution was found. Layers that call"):
            report = nhwc.convert_(model)
        assert repr(report) == "<Report: No 2D or 3D convolution was found>"
        assert " ".join(str(report).split()).startswith(
            "No 2D or 3D convolution was found. Layers that call torch.nn.functional.conv2d and its kin themselves, as "
            "those from torch.export do, show only where the model runs: give example_inputs. No new storage, "
        )
        assert report.table() == ""
        report.revert()

    @pytest.mark.parametrize("made", [nn.Linear(8, 3), nn.Conv1d(3, 3, 3)], ids=["Linear", "Conv1d"])
    def test_of_a_model_that_ran_and_has_no_convolutions(self, made):
        inputs = torch.randn(2, 3, 8)
        nothing = f"nothing to convert in the {type(made).__name__}: no 2D or 3D convolution was found"
        with pytest.warns(UserWarning, match=f"torch_nhwc: {nothing}$"):
            report = nhwc.convert_(made, example_inputs=inputs)
        assert str(report).startswith("No 2D or 3D convolution was found.\nNo new storage, ")
        plan = nhwc.plan(made, example_inputs=inputs)
        assert str(plan) == str(nhwc.Plan.from_json(plan.to_json())) == "No 2D or 3D convolution was found.\n"
        with pytest.raises(RuntimeError, match=f"{nothing} \\(nothing was changed"):
            nhwc.convert_(made, plan=plan, strict=True)


def three(*more):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3), *more)


def tied():
    model = three(nn.Conv2d(4, 4, 3))
    model[3].weight = model[2].weight
    return model


def exchanged():
    model = three()
    nhwc.convert_(model[0], each_forward=True)
    return model


TO_MOVE = "2 to move (1.0 kB), 1 to get new strides only"
MOVED = "2 moved (1.0 kB), 1 needed new strides only"
# A model, the options, and what a plan and a report say of them.
SUMMARIES = {
    "plain": (
        three,
        {},
        f"3 weights would be channels-last: {TO_MOVE}, 0 left",
        f"3 weights are channels-last: {MOVED}, 0 left",
    ),
    "one": (
        lambda: nn.Conv2d(3, 4, 3),
        {},
        "1 weight would be channels-last: 1 to move (432 bytes), 0 left",
        "1 weight is channels-last: 1 moved (432 bytes), 0 left",
    ),
    "contiguous": (
        lambda: three().to(memory_format=torch.channels_last),
        {"memory_format": "contiguous_format"},
        f"3 weights would be contiguous: {TO_MOVE}, 0 left",
        f"3 weights are contiguous: {MOVED}, 0 left",
    ),
    "in format": (
        three,
        {"memory_format": "contiguous_format"},
        "3 weights would be contiguous: 3 in format already, 0 left",
        "3 weights are contiguous: 3 in format before, 0 left",
    ),
    "tied": (
        tied,
        {},
        f"3 weights would be channels-last: {TO_MOVE}, 0 left. 1 more is tied to another",
        f"3 weights are channels-last: {MOVED}, 0 left. 1 more is tied to another",
    ),
    "filtered": (
        three,
        {"filter_fn": lambda module, path: path == "0"},
        "1 weight would be channels-last: 1 to move (432 bytes). 2 would be left as they are: 2 left out by the filter",
        "1 weight is channels-last: 1 moved (432 bytes). 2 were left as they are: 2 left out by the filter",
    ),
    "all filtered": (
        three,
        {"filter_fn": lambda module, path: False},
        "3 weights would be left as they are: 3 left out by the filter",
        "3 weights were left as they are: 3 left out by the filter",
    ),
    "2D alone": (
        network,
        {"memory_format": "channels_last"},
        f"3 weights would be channels-last: {TO_MOVE}. 1 would be left as it is: 1 of 3D convolutions, which were not "
        "asked for",
        f"3 weights are channels-last: {MOVED}. 1 was left as it is: 1 of 3D convolutions, which were not asked for",
    ),
    "3D alone": (
        network,
        {"memory_format": torch.channels_last_3d},
        "1 weight would be channels-last: 1 to move (216 bytes). 3 would be left as they are: 3 of 2D convolutions, "
        "which were not asked for",
        "1 weight is channels-last: 1 moved (216 bytes). 3 were left as they are: 3 of 2D convolutions, which were not "
        "asked for",
    ),
    "lazy": (
        lambda: three(nn.LazyConv2d(3, 3), nn.LazyConv2d(3, 3)),
        {},
        f"3 weights would be channels-last: {TO_MOVE}, 0 left. 2 have no shape yet, and would be converted when they "
        "get one",
        f"3 weights are channels-last: {MOVED}, 0 left. 2 have no shape yet, and are converted when they get one",
    ),
    "lazy, to contiguous": (
        lambda: nn.LazyConv2d(3, 3),
        {"memory_format": "contiguous_format"},
        "1 weight has no shape yet, and would be contiguous when it gets one, 0 left",
        "1 weight has no shape yet, and is contiguous when it gets one, 0 left",
    ),
    "refused": (
        lambda: three(refused_view(), refused_view()),
        {},
        f"3 weights would be channels-last: {TO_MOVE}. 2 would be left as they are: 2 refused",
        f"3 weights are channels-last: {MOVED}. 2 were left as they are: 2 refused",
    ),
    "meta": (
        lambda: three().to("meta"),
        {},
        "3 weights would be channels-last: 3 on the meta device, where only strides change, 0 left",
        "3 weights are channels-last: 3 on the meta device, where only strides change, 0 left",
    ),
    "each forward": (
        exchanged,
        {"each_forward": True},
        "2 weights would be converted in each forward, 0 left. 1 is converted in each forward already",
        "2 weights are converted in each forward, 0 left. 1 is converted in each forward already",
    ),
    "one channel": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last),
        {},
        "1 weight would be channels-last: 1 in format already, 0 left. 1 would be contiguous by new strides, since its "
        "filters have one channel",
        "1 weight is channels-last: 1 in format before, 0 left. 1 is contiguous by new strides, since its filters have "
        "one channel",
    ),
    "one channel, contiguous": (
        lambda: nn.ModuleList([nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 3), refused_view()]),
        {},
        "2 weights would stay contiguous, since their filters have one channel. 1 would be left as it is: 1 refused",
        "2 weights stayed contiguous, since their filters have one channel. 1 was left as it is: 1 refused",
    ),
    "one channel alone": (
        lambda: nn.Conv2d(1, 4, 3),
        {},
        "1 weight would stay contiguous, since its filters have one channel, 0 left",
        "1 weight stayed contiguous, since its filters have one channel, 0 left",
    ),
    "some in each forward": (
        exchanged,
        {},
        "2 weights would be channels-last: 1 to move (576 bytes), 1 to get new strides only, 0 left. 1 is converted in "
        "each forward already",
        "2 weights are channels-last: 1 moved (576 bytes), 1 needed new strides only, 0 left. 1 is converted in each "
        "forward already",
    ),
}


@pytest.mark.filterwarnings("ignore:torch_nhwc")
@pytest.mark.parametrize("name", SUMMARIES)
def test_begins_with_what_became_of_how_many_weights(name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    make, options, planned, done = SUMMARIES[name]
    model = make()
    plan = nhwc.plan(model, **options)
    dry = nhwc.convert_(model, dry_run=True, **options)
    report = nhwc.convert_(model, **options)
    assert [repr(each) for each in (plan, dry, report)] == [
        f"<Plan: {planned}>",
        f"<Report: {planned}>",
        f"<Report: {done}>",
    ]
    assert [str(each).splitlines()[0] for each in (plan, dry, report)] == [f"{planned}.", f"{planned}.", f"{done}."]
    assert [str(each).splitlines()[-1] for each in (plan, dry, report)] == ["(Every row: .table())"] * 3


def test_of_fake_tensors_says_that_they_stay():
    with FakeTensorMode():
        model = three()
        assert repr(nhwc.plan(model)) == (
            "<Plan: 3 weights would be left as they are: 3 fake, since a plan is for the real ones>"
        )


@pytest.mark.parametrize("columns", [80, 120])
def test_names_only_what_needs_a_look(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    model = nn.ModuleDict(
        {"stem": nn.Conv2d(3, 64, 7), "block": nn.Sequential(nn.Conv2d(64, 64, 1)), "view": refused_view()}
    )
    model["norm"] = parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    held = model["stem"].weight.detach()
    with pytest.warns(UserWarning, match="1 of 5 sites"):
        report = nhwc.convert_(model)
    lines = str(report).splitlines()
    names = [line for line in lines if line.startswith("  ") and "Conv2d  " in line]
    assert names == [
        "  view  Conv2d  4x3x3x3",
        "  norm.parametrizations.weight.original0  ParametrizedConv2d  4x1x1x1",
        "  norm.parametrizations.weight.original1  ParametrizedConv2d  4x3x3x3",
    ]
    text = " ".join(" ".join(line for line in lines if line not in names).split())
    assert text.startswith(
        "4 weights are channels-last: 2 moved (38.1 kB), 1 needed new strides only, 1 in format before. 1 was left as "
        f"it is: 1 refused. 1 refused, PART_OF_LARGER_STORAGE: {Reason.PART_OF_LARGER_STORAGE.value} 2 with a remark, "
        f"COPIED_EACH_FORWARD: {Reason.COPIED_EACH_FORWARD.value} Moved: 1 in place, 1 to new storage (something else "
        "holds the old one). 37.6 kB of new storage, "
    )
    assert held.is_contiguous()


def test_has_a_table_of_all_rows(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    model = nn.ModuleDict({"stem": nn.Conv2d(3, 64, 7), "block": nn.Sequential(nn.Conv2d(64, 64, 1), nn.GELU())})
    model["view"] = refused_view()
    model["view"].weight = nn.Parameter(torch.randn(216).half()[108:].view(4, 3, 3, 3))
    model["later"] = nn.LazyConv2d(3, 3)
    with pytest.warns(UserWarning, match="1 of 4 sites"):
        report = nhwc.convert_(model, preserve=True)
    lines = report.table().splitlines()
    assert lines[:7] == [
        "site     layer       shape      dtype    action    reason",
        "stem     Conv2d      64x3x7x7   float32  in place",
        "block.0  Conv2d      64x64x1x1  float32  restride",
        "view     Conv2d      4x3x3x3    float16  refuse    PART_OF_LARGER_STORAGE",
        "later    LazyConv2d                      convert   LAZY",
        "layer that loses  class  action",
        "block.1           GELU   exchange",
    ]
    assert [line.split(":")[0] for line in lines[7:] if not line.startswith(" ")] == ["PART_OF_LARGER_STORAGE", "LAZY"]
    before = nhwc.plan(model, "contiguous_format").table()
    assert "LAZY" in before
    assert Reason.LAZY.value[:20] not in before  # nothing will be converted


def test_names_ten_sites_of_one_reason():
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3) for _ in range(9)), *(refused_view() for _ in range(12)))
    lines = str(nhwc.plan(model)).splitlines()
    assert sum(line.endswith("Conv2d  4x3x3x3") for line in lines) == 10
    assert "  ... and 2 more" in lines
    assert len(nhwc.plan(model).table().splitlines()) > 21


def test_says_what_became_of_layers_and_of_what_follows_the_weights(monkeypatch):
    class Own(nn.GELU):
        """Has a forward of its own, for all that is known."""

    monkeypatch.setenv("COLUMNS", "300")
    model = three(nn.GroupNorm(2, 4), nn.GELU(), nn.GELU(), *(Own() for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    options = {"optimizer": optimizer, "ema": copy.deepcopy(model), "preserve": True}
    loses = "on channels-last it loses"
    kept = f"4 Own kept (6, 7, 8 and 1 more): {Reason.OTHER_CLASS.value}; {loses} speed, forward and backward"
    lines = str(nhwc.convert_(model, dry_run=True, **options)).splitlines()
    assert lines[2:5] == [f"2 GELU to exchange: {loses} speed, forward and backward", kept, "To be laid out as their "
        "weights: 3 grad, 3 exp_avg, 3 exp_avg_sq, 3 ema."]  # fmt: skip
    report = nhwc.convert_(model, **options)
    lines = str(report).splitlines()
    assert lines[1].startswith(f"1 GroupNorm exchanged: {loses} accuracy, forward and backward, ")
    assert lines[2:6] == [
        f"2 GELU exchanged: {loses} speed, forward and backward",
        kept,
        "Moved: 2 in place.",
        "Laid out as their weights: 3 grad, 3 exp_avg, 3 exp_avg_sq, 3 ema.",
    ]
    assert lines[-2].startswith("No new storage, ")
    assert f"2 GELU kept: {Reason.EXCHANGED.value}" in str(nhwc.plan(model, preserve=True)).splitlines()


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_fits_the_terminal(columns, monkeypatch):
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
        report = nhwc.convert_(model, optimizer=torch.optim.SGD([part.norm.bias], lr=0.1))
    for text in (str(plan), str(report), plan.table(), report.table()):
        assert max(map(len, text.splitlines())) <= columns


@pytest.mark.parametrize(
    ("paths", "shown"),
    [
        (["a.b.conv1", "a.b.conv2"], ["a.b.conv1", "a.b.conv2"]),
        (
            [f"{'long_' * 12}front.stages.{index}.conv" for index in (0, 1)],
            ["...stages.0.conv", "...stages.1.conv"],
        ),
        (["stem", f"{'long_' * 12}.front.stages.0.conv"], ["stem", "...front.stages.0.conv"]),
        (["x" * 80], ["..." + "x" * 49]),
        (
            ["stem", *(f"front.{index}.{'long_' * 9}block.convolution" for index in (0, 1))],
            ["stem", "...0...convolution", "...1...convolution"],
        ),
    ],
)
def test_paths_lose_their_front_and_never_their_end(paths, shown, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    lines = table([[path, "Conv2d"] for path in paths]).splitlines()
    assert [line.split()[0] for line in lines] == shown
    assert max(map(len, lines)) <= 60


def test_the_table_says_which_weight_of_one_channel_gets_contiguous_strides():
    model = nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last)
    report = nhwc.convert_(model)
    assert model.weight.stride() == (9, 9, 3, 1)
    assert "to contiguous  ONE_CHANNEL" in report.table().splitlines()[1]
    assert "1 contiguous, ONE_CHANNEL: its filters have one channel" in str(report)


class TestWithNothingToConvert:
    """Of a model that has no weight of the rank that was asked for."""

    @pytest.mark.parametrize(
        ("layer", "asked", "instead"),
        [(nn.Conv3d, "channels_last", "channels_last_3d"), (nn.Conv2d, torch.channels_last_3d, "channels_last")],
    )
    def test_there_is_a_warning_and_an_error_where_it_is_strict(self, layer, asked, instead):
        model = nn.Sequential(layer(3, 4, 3))
        model[0].weight.grad = torch.zeros_like(model[0].weight)
        before = snapshot(model)
        rank, other = model[0].weight.dim() - 2, str(asked).removeprefix("torch.")
        message = (
            f"nothing to convert in the Sequential: its convolutions are {rank}D: ask for {instead}, or for no format, "
            f"not for {other}"
        )
        plan = nhwc.plan(model, asked)  # silent: what is done about it is said by whoever applies it
        for convert in (
            lambda **options: nhwc.convert_(model, asked, **options),
            lambda **options: nhwc.convert_(model, plan=plan, **options),
            lambda **options: nhwc.convert_(model, asked, input_format="channels_last", **options),
        ):
            with pytest.raises(RuntimeError, match=f"{message} \\(nothing was changed, since strict=True\\)"):
                convert(strict=True)
            assert_unchanged(model, before)
            assert not model._forward_pre_hooks
            with pytest.warns(UserWarning, match=f"{message}$") as warned:
                convert().revert()
            assert [each.filename for each in warned] == [__file__]
        assert_unchanged(model, before)

    def test_the_context_warns_and_restoring_does_too(self):
        model = nn.Linear(3, 3)
        with pytest.warns(UserWarning, match="nothing to convert in the Linear"), nhwc.channels_last(model) as report:
            pass
        with pytest.warns(UserWarning, match="nothing to convert in the Linear"):
            nhwc.restore_(model, report.plan)

    def test_there_is_no_warning_where_layers_are_exchanged_or_weights_are_left_out_on_purpose(self):
        model = nn.Sequential(nn.GELU())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):  # the second time they are exchanged already
                nhwc.convert_(model, preserve=True, strict=True)
            nhwc.convert_(model, torch.contiguous_format, strict=True)
            assert type(model[0]) is nn.GELU
            nhwc.convert_(nn.Conv2d(3, 3, 3), filter_fn=lambda module, path: False, strict=True)
            nhwc.convert_(network(), "channels_last", strict=True)
            nhwc.convert_conv2d_weight_memory_format(nn.Conv3d(3, 3, 3), torch.channels_last)  # as stock

    @pytest.mark.parametrize("kept", [False, True])
    def test_is_copied_and_saved_with_the_module_that_keeps_it(self, kept, tmp_path):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyConv2d(4, 3), nn.GroupNorm(2, 4))
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
        ema = {"0.weight": torch.randn(4, 3, 3, 3)}
        report = nhwc.convert_(model, optimizer=optimizer, ema=ema, preserve=True, input_format="channels_last")
        model.report = report if kept else None
        torch.save(model, tmp_path / "model.pt")
        torch.save(report, tmp_path / "report.pt")
        model(torch.randn(1, 3, 8, 8))
        for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
            other(torch.randn(1, 3, 8, 8))
            if kept:
                assert str(other.report) == str(report)
        for copied in (copy.deepcopy(report), torch.load(tmp_path / "report.pt", weights_only=False)):
            assert copied.plan == report.plan
            assert copied.companions == report.companions
            assert copied.to_json() == report.to_json()
            assert not nhwc.check(model, copied.plan)
            with pytest.raises(RuntimeError, match="only the original goes back"):
                copied.revert()
        copy.copy(report).revert()
        assert type(model[2]) is nn.GroupNorm
        assert model[0].weight.is_contiguous()

    def test_names_its_reasons_in_pickles(self):
        for reason in Reason:
            assert pickle.loads(pickle.dumps(reason)) is reason
            assert reason.name.encode() in pickle.dumps(reason)
            assert reason.value.encode() not in pickle.dumps(reason)
