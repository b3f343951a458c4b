"""The commands that answer a question about a model: trace, audit, tune, verify; and what all commands take."""

import json
import os
import re
import sys
from dataclasses import replace

import pytest
import torch
from selection import exhaustive, some_of
from torch import nn
from typer.testing import CliRunner

import torch_nhwc
from torch_nhwc.cli import commands, inputs
from torch_nhwc.cli.tune import _answer

FACTORIES = """
import torch
from planted_faults import Scrambled
from torch import nn


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.words, self.end = nn.Conv2d(3, 8, 3), nn.Embedding(2, 8), nn.Softmax2d()

    def forward(self, pixel_values, input_ids):
        assert input_ids.dtype == torch.int64
        return self.end(self.layer(pixel_values)) * self.words(input_ids).mean()


class Tuple(nn.Conv2d):
    def forward(self, x, scale):
        return super().forward(x) * scale


def losing():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Softmax2d(), nn.Conv2d(8, 8, 3)), torch.randn(2, 3, 8, 8)


def keeping():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), torch.randn(2, 3, 8, 8)


def scrambled():
    return nn.Sequential(nn.Conv2d(3, 8, 3), Scrambled(8, 8, 3)), torch.randn(2, 3, 8, 8)


def named():
    return Named()


def of_two():
    return Tuple(3, 8, 3)


def lazy():
    return nn.Sequential(nn.LazyConv2d(8, 3), nn.ReLU()), torch.randn(2, 3, 8, 8)


def without_gradient():
    return nn.Sequential(nn.Conv2d(3, 8, 3)).requires_grad_(False), torch.randn(2, 3, 8, 8)


def broken():
    return {}["x"]


def interrupted():
    raise KeyboardInterrupt
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a command in this process, in a folder that has a module with factories."""
    (tmp_path / "of_questions.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delitem(sys.modules, "of_questions", raising=False)
    return lambda *arguments: CliRunner().invoke(commands.app, [*map(str, arguments)])


def of(name):
    return ["--factory", f"of_questions:{name}"]


@pytest.mark.filterwarnings("ignore:.torch.jit")
class TestTrace:
    """`torch-nhwc trace`."""

    def test_a_contiguous_model_has_nothing_to_lose_and_is_told_so(self, run):
        ran = run("trace", *of("losing"), "--max-losses", 0, "--max-mixed", 0)
        assert ran.exit_code == 0
        assert ran.stdout.startswith("Trace: 3 operators forward, 0 backward: no loss, no mixed convolution")
        assert ran.stderr == (
            "torch-nhwc: the model ran contiguous throughout: see what it would lose by --convert, or --preserve\n"
        )

    def test_names_what_a_converted_model_loses_forward_and_backward_and_ends_with_1_beyond_what_is_allowed(self, run):
        ran = run("trace", *of("losing"), "--convert", "--mode", "training", "--max-losses", 1, "--max-mixed", 0)
        assert ran.exit_code == 1
        assert re.search(r"^1 +_softmax +forward", ran.stdout, re.MULTILINE)
        assert "2 losses of channels-last, 1 are allowed" in ran.stderr
        assert "_softmax_backward_data in 1, backward" in ran.stderr
        assert "mixed convolution" in ran.stderr
        assert run("trace", *of("losing"), "--convert", "--max-mixed", 3).exit_code == 0
        ran = run("trace", *of("losing"), "--convert", "--max-bytes", 10)
        assert (ran.exit_code, "10 bytes are allowed" in ran.stderr) == (1, True)

    def test_of_exchanged_layers_is_clean(self, run):
        ran = run("trace", *of("losing"), "--preserve", "--mode", "training", "--max-losses", 0, "--max-mixed", 0)
        assert ran.exit_code == 0, ran.stderr
        assert not ran.stderr

    def test_prints_json_and_writes_a_page(self, run, tmp_path):
        ran = run("trace", *of("losing"), "--convert", "--reorders", "--json", "--html", "trace.html")
        trace = torch_nhwc.Trace.from_json(ran.stdout)
        assert [loss.path for loss in trace.losses] == ["1"]
        assert "<html" in (tmp_path / "trace.html").read_text()

    def test_takes_inputs_by_name_and_of_other_dtypes_and_several_by_position(self, run):
        shapes = "--input-shape", "pixel_values=2,3,8,8:bfloat16", "--input-shape", "input_ids=1,4:int64"
        ran = run("trace", *of("named"), *shapes, "--dtype", "bfloat16", "--convert", "--json")
        (loss,) = torch_nhwc.Trace.from_json(ran.stdout).losses
        assert (loss.path, loss.outputs[0].shape) == ("end", (2, 8, 6, 6))
        ran = run("trace", *of("of_two"), "--input-shape", "2,3,8,8", "--input-shape", "1", "--autocast", "bfloat16")
        assert ran.exit_code == 0, ran.stderr

    def test_reads_torchscript_and_what_torch_save_wrote_where_that_is_allowed(self, run, tmp_path):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Softmax2d())
        torch.jit.script(model).save(tmp_path / "scripted.pt")
        torch.save(model, tmp_path / "whole.pt")
        torch.save(model.state_dict(), tmp_path / "state_dict.pt")
        arguments = "--input-shape", "2,3,8,8", "--convert", "--json"
        for named in (["--torchscript", "scripted.pt"], ["--pickle", "whole.pt", "--allow-pickle"]):
            ran = run("trace", *named, *arguments)
            (loss,) = torch_nhwc.Trace.from_json(ran.stdout).losses
            assert loss.operator == "aten::_softmax"
        ran = run("trace", "--pickle", "whole.pt", *arguments)
        assert (ran.exit_code, "runs whatever code is in it: trust it by --allow-pickle" in ran.stderr) == (2, True)
        ran = run("trace", "--pickle", "state_dict.pt", "--allow-pickle", *arguments)
        assert (ran.exit_code, "expected a whole module in state_dict.pt, got a OrderedDict" in ran.stderr) == (2, True)
        ran = run("trace", "--pickle", "of_questions.py", "--allow-pickle", *arguments)
        assert (ran.exit_code, "of_questions.py cannot be loaded" in ran.stderr) == (2, True)


class TestAudit:
    """`torch-nhwc audit`."""

    @pytest.mark.parametrize("name", some_of(["profile.json", "profile.json.gz"], "profile.json.gz"))
    def test_tells_the_losses_of_a_saved_profile_and_holds_them_to_a_budget(self, name, run):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Softmax2d(), nn.Conv2d(8, 8, 3))
        with torch_nhwc.channels_last(model), torch.profiler.profile(record_shapes=True) as profile:
            model(torch.randn(2, 3, 8, 8))
        profile.export_chrome_trace(name)
        ran = run("audit", name, "--max-losses", 0, "--html", "audit.html")
        assert ran.exit_code == 1
        assert "softmax" in ran.stdout
        assert "softmax in" in ran.stderr
        ran = run("audit", name, "--json")
        assert ran.exit_code == 0
        assert torch_nhwc.Trace.from_json(ran.stdout).losses

    def test_of_anything_else_is_an_error_in_a_line(self, run):
        for path, message in (("nowhere.json", "expected a file, got nowhere.json"), ("of_questions.py", "audit: exp")):
            ran = run("audit", path)
            assert ran.exit_code == 2
            assert message in ran.stderr
            assert len(ran.stderr.splitlines()) == 1


class TestTune:
    """`torch-nhwc tune`."""

    def test_prints_the_table_and_the_answer_and_keeps_the_decision(self, run, tmp_path):
        arguments = "--mode", "training", "--optimizer", "AdamW", "--budget", 0.2, "--save", "tuning.json"
        ran = run("tune", *of("losing"), *arguments, "--html", "tuning.html")
        assert ran.exit_code == 0, ran.stderr
        for word in ("Tuning: ", "mode training", "optimizer AdamW", "contiguous", "full, preserved", "regret"):
            assert word in ran.stdout
        assert "Leave the model as it is" in ran.stdout or "nhwc.convert_(model, plan=nhwc.Tuning" in ran.stdout
        tuning = torch_nhwc.Tuning.from_json((tmp_path / "tuning.json").read_text())
        assert tuning.workload["shapes"] == ["2x3x8x8"]
        assert "<html" in (tmp_path / "tuning.html").read_text()

    def test_prints_json_and_leaves_layers_as_they_are_where_it_is_told_to(self, run):
        ran = run("tune", *of("losing"), "--budget", 0.1, "--no-preserve", "--autocast", "bfloat16", "--json")
        tuning = torch_nhwc.Tuning.from_json(ran.stdout)
        assert tuning.workload["autocast"] == "bfloat16"
        assert "full, preserved" not in [row.name for row in tuning.table]

    def test_says_how_the_plan_that_was_kept_is_applied(self):
        tuning = torch_nhwc.tune(nn.Conv2d(3, 8, 3), torch.randn(1, 3, 8, 8), budget_seconds=0.01)
        assert _answer(replace(tuning, choice="contiguous"), None).startswith("Leave the model as it is")
        answer = " ".join(_answer(replace(tuning, choice="full"), None).split())
        assert answer.startswith("Convert the model by the plan 'full'")
        assert answer.endswith("plan), which --save tuning.json keeps.")


class TestVerify:
    """`torch-nhwc verify`."""

    def test_of_a_right_conversion_ends_with_0(self, run):
        ran = run("verify", *of("keeping"), "--mode", "training")
        assert ran.exit_code == 0, ran.stdout
        assert "2 weights are channels-last" in ran.stdout
        assert "nothing differs" in ran.stdout

    def test_of_a_wrong_layer_ends_with_1_and_names_it(self, run, tmp_path):
        ran = run("verify", *of("scrambled"), "--html", tmp_path / "verification.html")
        assert ran.exit_code == 1
        assert "<td>Scrambled</td>" in (tmp_path / "verification.html").read_text()
        assert "first '1' (Scrambled): output" in ran.stdout
        ran = run("verify", *of("scrambled"), "--json")
        assert ran.exit_code == 1
        read = json.loads(ran.stdout)
        assert (read["ok"], {row["path"] for row in read["rows"] if row["verdict"] == "differs"}) == (False, {"1"})
        assert run("verify", *of("scrambled"), "--atol", 1e6).exit_code == 0

    @pytest.mark.exhaustive
    def test_takes_what_convert_takes(self, run):
        assert run("verify", *of("losing"), "--preserve", "--mode", "training").exit_code == 0
        ran = run("verify", *of("lazy"), "--each-forward")
        assert ran.exit_code == 0
        assert "converted in each forward" in ran.stdout


def test_a_conversion_is_told_as_json_and_as_a_page(run, tmp_path):
    ran = run("convert", *of("losing"), "--json", "--html", "report.html", "--out", "converted.pt")
    read = json.loads(ran.stdout)
    assert read["is_right"]
    assert [row["outcome"] for row in read["rows"]] == ["REUSED", "REUSED"]
    assert (tmp_path / "converted.pt").exists()
    ran = run("plan", *of("losing"), "--html", "plan.html")
    assert ran.exit_code == 0
    for name in ("report.html", "plan.html"):
        assert "<html" in (tmp_path / name).read_text()


def test_a_conversion_goes_by_a_plan_that_was_kept(run, tmp_path):
    tuning = torch_nhwc.tune(nn.Sequential(nn.Conv2d(3, 8, 3)), torch.randn(2, 3, 8, 8), budget_seconds=0.01)
    planned = run("plan", *of("losing"), "--preserve", "--json").stdout
    (tmp_path / "plan.json").write_text(planned)
    kept = replace(tuning, plan=torch_nhwc.Plan.from_json(planned))
    (tmp_path / "tuning.json").write_text(kept.to_json())
    for name in ("plan.json", "tuning.json"):
        ran = run("convert", *of("losing"), "--plan", name)
        assert ran.exit_code == 0, ran.stderr
        assert "2 weights are channels-last" in ran.stdout
        assert "1 Softmax2d exchanged" in ran.stdout
    ran = run("convert", *of("losing"), "--plan", "plan.json", "--preserve")
    assert (ran.exit_code, "a plan has its own memory format" in ran.stderr) == (2, True)
    for name in ("nowhere.json", "of_questions.py"):
        ran = run("convert", *of("losing"), "--plan", name)
        assert (ran.exit_code, f"--plan: {name} cannot be read" in ran.stderr) == (2, True)


def test_a_conversion_that_is_verified_leaves_the_layers_that_would_differ(run):
    assert run("convert", *of("scrambled")).exit_code == 1
    ran = run("convert", *of("scrambled"), "--verify", "--table")
    assert ran.exit_code == 0
    assert "1 weight is channels-last" in ran.stdout
    assert "as verify has found" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trace", *of("named")], "of_questions:named comes without inputs: name a shape with --input-shape"),
        (["trace", *of("without_gradient"), "--mode", "training"], "in training mode the model has to return a tensor"),
        exhaustive(["tune", *of("without_gradient"), "--mode", "training"], "in training mode the model has to return"),
        (["tune", *of("losing"), "--budget", "0"], "expected --budget to be a positive number, got 0.0"),
        (["tune", *of("losing"), "--optimizer", "AdamW"], "--optimizer: expected --mode training"),
        (
            ["tune", *of("losing"), "--mode", "training", "--optimizer", "lr_scheduler"],
            "expected a class of torch.opti",
        ),
        (["tune", *of("losing"), "--save", "nowhere/x.json"], "--save: expected a file in a folder that is there"),
        (["trace", *of("losing"), "--html", "."], "--html: expected a file in a folder that is there"),
        (["verify", *of("losing"), "--autocast", "int8"], "--autocast: expected one of float64"),
        (["verify", *of("losing"), "--device", "abacus"], "--device: 'abacus' cannot be used"),
        (["trace", *of("broken")], "KeyError in of_questions.py, line"),
        (["trace", *of("named"), "--input-shape", "x=1", "--input-shape", "1"], "expected a name for each input"),
        (["trace", *of("named"), "--input-shape", "x=1", "--input-shape", "x=1"], "expected each name once"),
        (["trace", *of("named"), "--input-shape", "x=1:int3"], "expected a dtype among float64"),
        (["trace", *of("named"), "--input-shape", "x=1,:"], "expected sizes such as 1,3,224,224 or pixel_values="),
    ],
)
def test_errors_are_one_line(arguments, message, run):
    ran = run(*arguments)
    assert ran.exit_code == 2
    assert message in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_with_debug_an_error_shows_where_it_happened(run):
    ran = run("trace", *of("broken"), "--debug")
    assert ran.exit_code == 2
    assert "Traceback" in ran.stderr
    assert 'return {}["x"]' in ran.stderr


def test_ctrl_c_ends_with_130(run):
    assert run("trace", *of("interrupted")).exit_code == 130


def test_a_page_without_jinja2_is_refused_before_the_work(run, monkeypatch):
    monkeypatch.setattr("torch_nhwc.cli.outputs.find_spec", lambda name: None)
    ran = run("tune", *of("losing"), "--html", "x.html", "--budget", 1000)
    assert ran.exit_code == 2
    assert "jinja2 is missing: type `pip install 'torch-nhwc[page]'`" in ran.stderr


@pytest.mark.parametrize(
    ("text", "name", "sizes", "dtype"),
    [
        ("1,3,224,224", None, [1, 3, 224, 224], None),
        ("1, 3", None, [1, 3], None),
        ("4:bool", None, [4], torch.bool),
        ("pixel_values=1,3,8,8:float16", "pixel_values", [1, 3, 8, 8], torch.float16),
    ],
)
def test_a_shape_may_have_a_name_and_a_dtype(text, name, sizes, dtype):
    (shape,) = inputs.parse_shapes([text])
    assert shape == (name, sizes, dtype)
    made = inputs.random_inputs([shape], torch.empty(0, dtype=torch.float64))
    tensor = made if name is None else made[name]
    assert (list(tensor.shape), tensor.dtype) == (sizes, dtype or torch.float64)


NAMES = ["trace", "tune", "verify", "plan", "convert", "audit", "demo", "env"]
MY_MODEL = """
import torch


def build():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.Softmax2d(), torch.nn.Conv2d(16, 8, 3))
    return model, torch.randn(1, 3, 32, 32)
"""


def test_the_help_lists_every_command_and_what_their_ends_mean(run):
    ran = run("--help")
    text = " ".join(ran.stdout.split())
    for name in NAMES:
        assert re.search(rf"│ {name} +\w", text)
    assert "ends with 0 where all is well" in text
    assert [command.callback.__name__ for command in commands.app.registered_commands] == NAMES


@pytest.mark.parametrize("name", [*some_of(NAMES, "trace", "plan", "env")])
def test_the_help_of_a_command_has_an_example_that_runs(name, run, tmp_path):
    (tmp_path / "my_model.py").write_text(MY_MODEL)
    with torch.profiler.profile(record_shapes=True) as profile:
        nn.Conv2d(3, 8, 3)(torch.randn(2, 3, 8, 8))
    profile.export_chrome_trace("profile.json.gz")
    (example,) = re.findall(rf"For example: torch-nhwc ({name}.*?)\s*$", run(name, "--help").stdout, re.MULTILINE)
    budget = ["--budget", 1] if name == "tune" else []
    ran = run(*example.split(), *budget)
    assert ran.exit_code == 0, ran.stderr
