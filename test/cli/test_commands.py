"""The command line: what it reads, prints and refuses."""

import json
import logging
import os
import re
import subprocess
import sys
import textwrap
import warnings
from dataclasses import replace

import pytest
import torch
from selection import exhaustive, some_of
from simulated_machine import Machine
from torch import nn

import torch_nhwc
from torch_nhwc.cli import models
from torch_nhwc.tracing import Trace
from torch_nhwc.tuning import Tuning
from torch_nhwc_cli import options, program

FACTORIES = """
import torch
from planted_faults import Scrambled
from torch import nn


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 8, 3), nn.Dropout(), nn.GroupNorm(2, 8))
        self.kernel = nn.Parameter(torch.randn(8, 8, 3, 3))
        self.calls = 0

    def forward(self, image, scale=1.0):
        self.calls += 1
        image = nn.functional.conv2d(self.layers(image), self.kernel)
        return {"images": [scale * image], "count": torch.tensor(3)}


class Different(Two):
    def forward(self, image, scale=1.0):
        return super().forward(image, scale)["images"][0] + self.calls


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.words, self.end = nn.Conv2d(3, 8, 3), nn.Embedding(2, 8), nn.Softmax2d()

    def forward(self, pixel_values, input_ids):
        assert input_ids.dtype == torch.int64
        return self.end(self.layer(pixel_values)) * self.words(input_ids).mean()


def volumes():
    return nn.Sequential(nn.Conv3d(2, 8, 3), nn.GroupNorm(2, 8)), torch.randn(2, 2, 8, 8, 8)


class Printing(nn.Conv2d):
    def forward(self, x, mask):
        print("given", x.stride(), mask.stride())
        return super().forward(x * mask)


class Moving(Two):
    def to(self, *arguments, **options):
        print("it moves")
        return super().to(*arguments, **options)


made = nn.Conv2d(3, 8, 3)


def tensor():
    return Two(), torch.randn(2, 3, 8, 8)


def moving():
    return Moving()


def positional():
    return Two(), (torch.randn(2, 3, 8, 8), 3)


def keywords():
    return Two(), {"image": torch.randn(2, 3, 8, 8), "scale": 2.0}


def model():
    return Two()


def different():
    return Different(), torch.randn(2, 3, 8, 8)


def losing():
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.Softmax2d(), nn.Conv2d(16, 8, 3)), torch.randn(2, 3, 8, 8)


def one_channel():
    layers = nn.Conv3d(1, 8, 3, stride=2), nn.Conv3d(8, 8, 3), nn.Conv3d(8, 8, 3)
    return nn.Sequential(*layers), torch.randn(1, 1, 17, 17, 17)


def transposed():
    layers = nn.Conv3d(3, 32, 3, padding=1), nn.ConvTranspose3d(32, 16, 2, stride=2), nn.Conv3d(16, 8, 1)
    return nn.Sequential(*layers), torch.randn(1, 3, 4, 4, 4)


class Stacked(nn.Conv2d):
    def forward(self, x):
        y = super().forward(x)
        return torch.stack([y, y], 1).sum(1)


def stacked():
    return Stacked(3, 8, 3), torch.randn(2, 3, 8, 8)


def scrambled():
    return nn.Sequential(nn.Conv2d(3, 8, 3), Scrambled(8, 8, 3)), torch.randn(2, 3, 8, 8)


def lazy():
    return nn.Sequential(nn.LazyConv2d(4, 3)), torch.randn(2, 3, 8, 8)


def scripted():
    return torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3))), torch.randn(2, 3, 8, 8)


def named():
    return Named()


def volume():
    return nn.Conv3d(3, 4, 3)


def linear():
    return nn.Linear(3, 3), torch.randn(2, 3)


def printing():
    print("loading weights")
    return Printing(1, 8, 3, stride=2), (torch.randn(2, 1, 8, 8), torch.ones(2, 3, 8, 8, dtype=torch.uint8)[:, :1])


def wrong():
    return Two(), torch.randn(2, 4, 8, 8)


def outside():
    return nn.Sequential(nn.Conv2d(3, 8, 3)), torch.randn(2, 4, 8, 8)


def without_module():
    return 3


def interrupted():
    raise KeyboardInterrupt


def broken():
    return {}["x"]
"""

FORWARD = 1 + FACTORIES.splitlines().index("        image = nn.functional.conv2d(self.layers(image), self.kernel)")


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Run a command in this process, in a folder with a module of factories; return exit code, output and errors."""
    (tmp_path / "of_mine.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delitem(sys.modules, "of_mine", raising=False)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            program.app([*map(str, arguments)])
        read = capfd.readouterr()
        return ended.value.code, read.out, read.err

    return run


def of_mine(name):
    return ["--factory", f"of_mine:{name}"]


def assert_one_line(ran, message):
    code, _, error = ran
    assert code == 2
    assert error.startswith("torch-nhwc: ")
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize("command", [["plan"], ["trace", "--convert"], ["convert"], ["tune", "--budget", "0.1"]])
def test_what_the_users_code_prints_is_not_in_the_json(command, run):
    code, out, errors = run(*command, *of_mine("printing"), "--json")
    assert code == 0
    json.loads(out)
    assert "loading weights" in errors
    assert "given (" in errors


class TestTrace:
    """`torch-nhwc trace`."""

    def test_says_that_a_contiguous_model_has_nothing_to_lose(self, run):
        code, out, error = run("trace", *of_mine("losing"), "--max-losses", 0, "--max-mixed", 0)
        assert code == 0
        assert out.startswith("Trace: 3 operators forward, 0 backward: nothing to lose, no mixed convolution")
        assert error == (
            "torch-nhwc: the model ran contiguous: --convert shows what it would still lose after a conversion, and "
            "--convert --no-preserve what it would lose without replaced layers\n"
        )

    def test_names_what_a_converted_model_loses_and_ends_with_1_beyond_the_budget(self, run):
        arguments = ["trace", *of_mine("losing"), "--convert", "--no-preserve", "--mode", "training"]
        code, out, error = run(*arguments, "--max-losses", 1, "--max-mixed", 0)
        assert code == 1
        assert re.search(r"^1 +_softmax +forward", out, re.MULTILINE)
        assert "2 losses of channels-last, 1 are allowed" in error
        assert "mixed convolution" in error
        assert run(*arguments, "--max-mixed", 3)[0] == 0
        code, _, error = run(*arguments, "--max-bytes", 10)
        assert (code, "10 bytes are allowed" in error) == (1, True)

    def test_shows_no_loss_if_layers_are_replaced(self, run):
        for option in ("--convert", "--preserve"):
            arguments = [option, "--mode", "training", "--max-losses", 0, "--max-mixed", 0]
            code, _, error = run("trace", *of_mine("losing"), *arguments)
            assert (code, error) == (0, "")

    def test_says_the_one_cause_if_a_converted_model_stays_contiguous(self, run):
        code, out, error = run("trace", *of_mine("one_channel"), "--convert", "--no-preserve")
        assert (code, error) == (0, "")
        assert out.splitlines()[1] == "contiguous from 0 on: 3 of 3 modules"
        assert out.splitlines()[2].startswith("the input has one channel and stayed contiguous; from 1 on each convol")
        assert len(out.splitlines()) == 3

    def test_does_not_count_what_replaced_layers_restore(self, run):
        arguments = "--convert", "--mode", "training", "--max-losses", 0, "--max-mixed", 0, "--max-bytes", 0
        code, out, error = run("trace", *of_mine("transposed"), *arguments)
        assert (code, error) == (0, "")
        assert "by design: the layers restore the format" in out
        assert "channels-last from the input hook on, by clone" in out

    def test_names_the_operator_that_lost_the_format_in_another_rank(self, run):
        _, out, _ = run("trace", *of_mine("stacked"), "--convert", "--json")
        (loss,) = Trace.from_json(out).losses
        assert (loss.operator, loss.source.rpartition("/")[2][:8]) == ("aten::sum", "of_mine.")

    def test_prints_json_and_writes_a_page(self, run, tmp_path):
        _, out, _ = run("trace", *of_mine("losing"), "--no-preserve", "--json", "--html", "trace.html")
        assert [loss.path for loss in Trace.from_json(out).losses] == ["1"]
        assert "<html" in (tmp_path / "trace.html").read_text()

    def test_takes_random_inputs_by_name_and_of_other_dtypes(self, run):
        shapes = "--input-shape", "pixel_values=2,3,8,8:bfloat16", "--input-shape", "input_ids=1,4:int64"
        _, out, _ = run("trace", *of_mine("named"), *shapes, "--dtype", "bfloat16", "--convert", "--json")
        (row,) = Trace.from_json(out).restored
        assert (row.path, row.outputs[0].shape) == ("end", (2, 8, 6, 6))


class TestAudit:
    """`torch-nhwc audit`."""

    def test_finds_the_losses_of_a_saved_profile_and_compares_them_with_a_budget(self, run):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Softmax2d(), nn.Conv2d(8, 8, 3))
        with torch_nhwc.channels_last(model, preserve=False), torch.profiler.profile(record_shapes=True) as profile:
            model(torch.randn(2, 3, 8, 8))
        profile.export_chrome_trace("profile.json.gz")
        code, out, error = run("audit", "profile.json.gz", "--max-losses", 0)
        assert code == 1
        assert "softmax" in out
        assert "softmax in" in error
        code, out, _ = run("audit", "profile.json.gz", "--json")
        assert code == 0
        assert Trace.from_json(out).losses

    @pytest.mark.parametrize(
        ("path", "message"),
        [("nowhere.json", "expected a file, got nowhere.json"), ("of_mine.py", "audit: exp")],
    )
    def test_refuses_other_files(self, path, message, run):
        assert_one_line(run("audit", path), message)


class TestTune:
    """`torch-nhwc tune`."""

    def test_prints_the_table_and_the_advice_and_keeps_the_decision(self, run, tmp_path):
        arguments = "--mode", "training", "--optimizer", "AdamW", "--budget", 0.2, "--save", "tuning.json"
        code, out, _ = run("tune", *of_mine("losing"), *arguments)
        assert code == 0
        for word in ("Tuning: ", "mode training", "optimizer AdamW", "contiguous", "full, preserved"):
            assert word in out
        tuning = Tuning.from_json((tmp_path / "tuning.json").read_text())
        assert tuning.workload["shapes"] == ["2x3x8x8"]
        assert run("convert", *of_mine("losing"), "--plan", "tuning.json")[0] == 0

    def test_prints_a_line_of_code_that_runs(self, run, monkeypatch):
        model = nn.Sequential(nn.Conv2d(3, 8, 3))
        tuning = torch_nhwc.tune(model, torch.randn(1, 3, 8, 8), budget_seconds=0.01)
        plan = torch_nhwc.plan(model, input_format="channels_last")
        monkeypatch.setattr(
            torch_nhwc, "tune", lambda *_, **__: replace(tuning, choice="full", plan=plan, is_decided=True)
        )
        _, out, _ = run("tune", *of_mine("losing"), "--save", "mine.json")
        _, code = out.split("Convert the model by the plan 'full':\n")
        exec(textwrap.dedent(code), {"model": model})
        assert model[0].weight.stride() == (27, 1, 9, 3)
        assert len(model._forward_pre_hooks) == 1

    @pytest.mark.parametrize("policy", ["weights only", "full", "full, preserved"])
    @pytest.mark.parametrize("mode", ["inference", "training"])
    def test_prints_a_call_that_needs_no_file_and_has_the_optimizer(self, mode, policy, run, monkeypatch):
        times = dict.fromkeys(("contiguous", "weights only", "full", "full, preserved"), 0.1)
        Machine(monkeypatch, times | {policy: 0.01})
        _, out, _ = run("tune", *of_mine("volumes"), "--mode", mode)
        _, code = out.split(f"Convert the model by the plan {policy!r}:\n")
        assert ("optimizer=optimizer" in code) == (mode == "training")
        model = nn.Sequential(nn.Conv3d(2, 8, 3), nn.GroupNorm(2, 8))
        exec(textwrap.dedent(code), {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
        assert model[0].weight.stride() == (54, 1, 18, 6, 2)
        assert len(model._forward_pre_hooks) == (policy != "weights only")
        assert (type(model[1]) is nn.GroupNorm) == (policy != "full, preserved")

    def test_names_the_file_if_arguments_do_not_make_the_plan(self, run, monkeypatch):
        """The parameter that `forward` convolves with is in the plan by the example inputs alone."""
        times = dict.fromkeys(("contiguous", "weights only", "full", "full, preserved"), 0.1)
        Machine(monkeypatch, times | {"full": 0.01})
        _, out, _ = run("tune", *of_mine("tensor"))
        assert "Run this again with --save tuning.json. Convert the model by the plan 'full':\n" in out
        assert out.endswith('    torch_nhwc.convert_(model, plan="tuning.json")\n')

    def test_prints_json_and_replaces_no_layers_with_no_preserve(self, run):
        arguments = "--budget", 0.1, "--no-preserve", "--autocast", "bfloat16", "--json"
        tuning = Tuning.from_json(run("tune", *of_mine("losing"), *arguments)[1])
        assert tuning.workload["autocast"] == "bfloat16"
        assert "full, preserved" not in [row.name for row in tuning.table]

    @pytest.mark.parametrize(
        ("choice", "options", "advice"),
        [
            (
                "full",
                [],
                "Run this again with --save tuning.json. Convert the model by the plan 'full':\n    import torch_nhwc\n"
                '    torch_nhwc.convert_(model, plan="tuning.json")\n',
            ),
            (
                "full, compiled",
                ["--save", "of_mine.json"],
                "Convert the model by the plan 'full', then compile it:\n    import torch\n    import torch_nhwc\n"
                '    torch_nhwc.convert_(model, plan="of_mine.json")\n    model = torch.compile(model)\n',
            ),
            (
                "contiguous, compiled",
                [],
                "Compile the model and convert nothing:\n    import torch\n    model = torch.compile(model)\n",
            ),
            ("contiguous", [], "Leave the model as it is: no plan is certainly faster here.\n"),
            (
                "not decided",
                [],
                "Not decided: too few rounds (2). Give it a larger --budget; until then, leave the model as it is.\n",
            ),
        ],
    )
    def test_says_what_to_do_in_lines_that_run(self, choice, options, advice, run, monkeypatch):
        tuning = torch_nhwc.tune(nn.Conv2d(3, 8, 3), torch.randn(1, 3, 8, 8), budget_seconds=0.01)
        is_decided = choice != "not decided"
        chosen = choice if is_decided else "contiguous"
        tuning = replace(tuning, choice=chosen, compile=choice.endswith("compiled"), is_decided=is_decided)
        given = {}
        monkeypatch.setattr(torch_nhwc, "tune", lambda *_, **options: given.update(options) or tuning)
        _, out, _ = run("tune", *of_mine("losing"), "--compile", *options)
        assert given["compile"] is True
        assert out.endswith(advice)
        assert out.startswith(f"Tuning: {choice} (")

    @pytest.mark.parametrize("spelling", ["AdamW", "adamw", "torch.optim.AdamW"])
    def test_takes_the_name_of_an_optimizer_in_any_case(self, spelling, run, monkeypatch):
        given = {}

        def tune(*_, **options):
            given.update(options)
            raise KeyboardInterrupt

        monkeypatch.setattr(torch_nhwc, "tune", tune)
        run("tune", *of_mine("losing"), "--mode", "training", "--optimizer", spelling, "--autocast", "bf16")
        assert (given["optimizer"], given["autocast"]) == (torch.optim.AdamW, torch.bfloat16)

    def test_says_so_if_it_is_interrupted_before_anything_was_measured(self, run, monkeypatch):
        def tune(*_, **__):
            raise KeyboardInterrupt

        monkeypatch.setattr(torch_nhwc, "tune", tune)
        code, out, error = run("tune", *of_mine("losing"))
        assert (code, out, error) == (130, "", "torch-nhwc: interrupted before anything was measured\n")

    def test_says_early_if_it_takes_longer_than_its_budget(self, run, monkeypatch):
        Machine(monkeypatch, dict.fromkeys(("contiguous", "weights only", "full", "full, preserved"), 3.0))
        code, _, error = run("tune", *of_mine("losing"), "--budget", 8)
        assert code == 0
        assert re.fullmatch(r"torch-nhwc: tune: a round takes about 12 s: this takes about 3. s instead .*\n", error)


class TestVerify:
    """`torch-nhwc verify`."""

    def test_ends_with_0_for_a_right_conversion(self, run):
        code, out, _ = run("verify", *of_mine("losing"), "--mode", "training")
        assert code == 0
        assert "2 weights to channels-last: 2 converted" in out
        assert "nothing differs" in out

    def test_ends_with_1_and_names_a_layer_that_differs(self, run):
        code, out, _ = run("verify", *of_mine("scrambled"))
        assert code == 1
        assert "first '1' (Scrambled): output" in out
        code, out, _ = run("verify", *of_mine("scrambled"), "--json")
        assert (code, "Scrambled" in out, json.loads(out) != {}) == (1, True, True)
        assert run("verify", *of_mine("scrambled"), "--atol", 1e6)[0] == 0


class TestPlan:
    """`torch-nhwc plan`."""

    def test_prints_what_would_happen_to_the_weights_that_inputs_show(self, run):
        code, out, _ = run("plan", *of_mine("keywords"))
        assert code == 0
        assert out.splitlines()[0] == "2 weights to channels-last: 2 to convert (3.2 kB)."
        assert out.splitlines()[-1] == "(All rows: --table)"

    def test_takes_what_convert_takes(self, run):
        rows = {}
        for option in ("--preserve", "--no-preserve"):
            _, out, _ = run("plan", *of_mine("model"), option, "--each-forward", "--table")
            assert out.startswith("1 weight to channels-last: 1 in each forward.\n")
            assert "--table" not in out
            lines = map(str.split, out.splitlines())
            rows[option] = [line[1:4] for line in lines if line[:1] == ["layers.1"]]
        weight, layer = ["Conv2d", "8x3x3x3", "each_forward"], ["Conv2d", "replace"]
        assert rows == {"--preserve": [weight, layer], "--no-preserve": [weight]}

    def test_names_the_way_if_the_memory_format_is_of_the_other_rank(self, run):
        arguments = *of_mine("volume"), "--memory-format", "channels_last"
        sentence = (
            "nothing to convert in the {}: its convolutions are 3D: omit --memory-format, or pass 'channels_last_3d' "
            "instead of 'channels_last'"
        )
        for command in ("plan", "convert"):
            code, out, error = run(command, *arguments)
            assert (code, error) == (0, "")
            assert out.splitlines()[:2] == [
                "1 weight to channels-last: 1 of the other rank.",
                sentence.format("model"),
            ]
        assert_one_line(run("convert", *arguments, "--strict"), sentence.format("Conv3d"))
        _, out, _ = run("plan", *arguments, "--json")
        assert [row.reason.name for row in torch_nhwc.Plan.from_json(out).rows] == ["OTHER_RANK"]


@pytest.mark.filterwarnings("ignore:.torch.jit")
class TestConvert:
    """`torch-nhwc convert`."""

    @pytest.mark.parametrize("name", ["keywords", *map(exhaustive, ("tensor", "positional"))])
    def test_prints_the_report_compares_outputs_and_writes_the_state_dict(self, name, run, tmp_path):
        code, out, _ = run("convert", *of_mine(name), "--out", "converted.pt", "--no-preserve")
        assert code == 0
        lines = out.splitlines()
        assert lines[0] == "2 weights to channels-last: 2 converted (3.2 kB)."
        assert re.fullmatch(r"Outputs are within the tolerance \S+: the largest difference is .*", lines[-2])
        assert lines[-1] == "Written to converted.pt: state dict, to be loaded by load_state_dict(..., assign=True)."
        assert torch.load("converted.pt")["kernel"].stride() == (72, 1, 24, 8)
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["converted.pt", "of_mine.py"]

    def test_names_options_instead_of_arguments(self, run):
        _, out, _ = run("convert", *of_mine("tensor"), "--no-preserve")
        assert "--preserve" in out
        assert "preserve=" not in out

    def test_prints_json(self, run):
        read = json.loads(run("convert", *of_mine("losing"), "--json")[1])
        assert read["is_right"]
        assert "within the tolerance" in read["comparison"]

    def test_writes_an_archive_of_a_torchscript_model(self, run):
        assert run("convert", *of_mine("scripted"), "--out", "converted.pt")[0] == 0
        assert torch.jit.load("converted.pt").state_dict()["0.weight"].stride() == (27, 1, 9, 3)

    def test_writes_nothing_if_outputs_differ(self, run, tmp_path):
        code, out, _ = run("convert", *of_mine("different"), "--out", "converted.pt")
        assert code == 1
        assert "Outputs are BEYOND the tolerance" in out
        assert not (tmp_path / "converted.pt").exists()

    def test_leaves_a_file_as_it_was_if_writing_fails(self, run, tmp_path, monkeypatch):
        def fail(_, path):
            path.write_text("half")
            raise OSError("no space left")

        (tmp_path / "converted.pt").write_text("before")
        monkeypatch.setattr(torch, "save", fail)
        assert_one_line(run("convert", *of_mine("model"), "--out", "converted.pt"), "no space left")
        assert (tmp_path / "converted.pt").read_text() == "before"
        assert len([*tmp_path.glob("*converted*")]) == 1

    def test_converts_by_a_plan_that_was_kept(self, run, tmp_path):
        (tmp_path / "plan.json").write_text(run("plan", *of_mine("losing"), "--json")[1])
        code, out, _ = run("convert", *of_mine("losing"), "--plan", "plan.json")
        assert code == 0
        assert "1 Softmax2d" in out
        message = "a plan has its own memory format"
        assert_one_line(run("convert", *of_mine("losing"), "--plan", "plan.json", "--no-preserve"), message)
        assert_one_line(run("convert", *of_mine("losing"), "--plan", "of_mine.py"), "--plan: expected a file that")

    def test_converts_a_lazy_model_after_its_first_forward(self, run):
        code, out, _ = run("convert", *of_mine("lazy"), "--table")
        assert code == 0
        assert "0       Conv2d  4x3x3x3  convert" in out.splitlines()

    def test_converts_a_file_into_another_of_its_kind(self, run):
        torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3))).save("model.pt")
        code, out, _ = run("convert", "model.pt", "out.pt", "--input-format", "channels_last", "--table")
        assert code == 0
        lines = out.splitlines()
        assert lines[0] == "1 weight to channels-last: 1 converted (432 bytes)."
        assert lines[-1] == "Written to out.pt."
        converted = torch.jit.load("out.pt")
        assert converted.state_dict()["0.weight"].stride() == (27, 1, 9, 3)
        assert converted(torch.randn(2, 3, 8, 8)).is_contiguous(memory_format=torch.channels_last)
        code, out, _ = run("convert", "out.pt", "out.pt", "--memory-format", "contiguous_format", "--json")
        assert (code, json.loads(out) != {}) == (0, True)
        assert torch.jit.load("out.pt").state_dict()["0.weight"].is_contiguous()

    def test_loads_a_pickled_module_of_this_folder_if_allowed(self, run, tmp_path):
        (tmp_path / "of_here.py").write_text("import torch\nclass Net(torch.nn.Conv2d):\n    pass\n")
        save = "import torch, of_here; torch.save(of_here.Net(3, 4, 3), 'net.pt')"
        subprocess.run([sys.executable, "-c", save], check=True, cwd=tmp_path)
        assert_one_line(run("convert", "net.pt", "out.pt"), "--allow-pickle")
        assert run("convert", "net.pt", "out.pt", "--allow-pickle")[0] == 0

    def test_says_what_can_be_done_about_faulty_layers_of_a_file(self, run):
        torch.save(nn.Sequential(nn.Conv3d(3, 8, 3), nn.GroupNorm(2, 8), nn.InstanceNorm3d(8)), "net.pt")
        code, out, _ = run("convert", "net.pt", "out.pt", "--allow-pickle")
        assert code == 0
        text = " ".join(out.split())
        for fault in (
            "weight gradients PyTorch computes wrong",
            "group norm is inaccurate",
            "gradient of instance norm",
        ):
            assert fault in text
        advice = "a file keeps PyTorch's layers; convert_ replaces them in the model, once it is loaded"
        assert text.count(advice) == 3
        assert "preserve" not in text


@pytest.mark.parametrize(("options", "moves"), [([], False), (["--dtype", "bfloat16"], True)])
def test_a_model_s_own_to_is_called_if_it_is_asked_for(options, moves, run):
    code, out, error = run("plan", "--factory", "of_mine.py:moving", *options)
    assert code == 0, error
    assert ("it moves" in out + error) is moves


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_env_shows_what_a_report_of_a_problem_needs(option, run):
    _, out, _ = run("env", *option)
    for word in (torch_nhwc.__version__, torch.__version__, "cxx_compiler", "capability", "cuda_architectures"):
        assert word in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "name one model, by --model or --factory"),
        (["plan", "--nothing"], "No such option: --nothing"),
        (["plan", "--mode"], "No such option: --mode"),
        (["trace", "--mode", "both"], "'both' is not one of 'inference', 'training'"),
        (["trace", "--max-losses", "-1"], "Invalid value for '--max-losses'"),
        (["audit"], "Missing argument 'FILE'"),
        (["tuna"], "No such command 'tuna'"),
        (["plan", "--model", "resnet50", *of_mine("model")], "name one model, by --model or --factory"),
        (["plan", "--model", "alexnet"], "--model: expected one of resnet50, unet3d, video-autoencoder, got 'alexnet'"),
        (["plan", "--factory", "json:nothing"], "expected module:callable, got 'json:nothing'"),
        (["plan", *of_mine("made")], "of_mine:made is a module: expected a function that returns one"),
        (["plan", *of_mine("without_module")], "to return a module, or a module and its inputs"),
        (["plan", *of_mine("broken")], f"KeyError in of_mine.py, line {len(FACTORIES.splitlines())}: 'x'"),
        (["convert", *of_mine("wrong")], f"RuntimeError in of_mine.py, line {FORWARD}: Given groups=1"),
        (["convert", *of_mine("outside")], "RuntimeError: Given groups=1"),
        (["plan", *of_mine("model"), "--dtype", "int8"], "--dtype: expected one of float64, float32"),
        (["plan", *of_mine("model"), "--device", "abacus"], "abacus"),
        (["trace", *of_mine("named")], "comes without inputs: give a shape by --input-shape, such as 1,3,224,224"),
        (["trace", *of_mine("volume")], "give a shape by --input-shape, such as 1,3,32,32,32"),
        (["plan", "--factory", "nets.build_model"], "got 'nets.build_model': did you mean nets:build_model?"),
        (["trace", "--model", "resnet50", "--mode", "train"], "Invalid value for '--mode': 'train' is not one of"),
        (["trace", *of_mine("named"), "--input-shape", "x=1", "--input-shape", "x=1"], "a different name for each"),
        (["trace", *of_mine("named"), "--input-shape", "x=1:int3"], "expected one of float64"),
        (["trace", *of_mine("named"), "--input-shape", "1,-3"], "expected sizes such as 1,3,224,224 or pixel_values="),
        (["trace", *of_mine("losing"), "--html", "."], "--html: expected a file in a folder that exists"),
        (["tune", *of_mine("losing"), "--budget", "0"], "--budget: expected a positive number, got 0.0"),
        (["tune", *of_mine("losing"), "--optimizer", "AdamW"], "--optimizer: expected --mode training"),
        (
            ["tune", *of_mine("losing"), "--mode", "training", "--optimizer", "lr_scheduler"],
            "--optimizer: expected a class of torch.optim",
        ),
        (["tune", *of_mine("losing"), "--save", "nowhere/x.json"], "--save: expected a file in a folder that exists"),
        (["verify", *of_mine("losing"), "--autocast", "int8"], "--autocast: expected one of float64"),
        (["convert", "model.pt"], "name the file to write: torch-nhwc convert model.pt converted.pt"),
        (
            ["convert", "a.pt", "b.pt", "--input-format", "nhwc"],
            "--input-format: expected one of channels_last, channe",
        ),
        (["plan", *of_mine("model"), "--memory-format", "nhwc"], "--memory-format: expected one of channels_last, ch"),
        (["plan", "--factory", "of_mine.py"], "--factory: expected module:callable, got 'of_mine.py'"),
        (["convert", "a.pt", "b.pt", "--preserve"], "with the files IN and OUT, leave out --preserve,"),
        (["convert", "a.pt", "b.pt", "--no-preserve"], "with the files IN and OUT, leave out --preserve,"),
        (["convert", "missing.pt", "out.pt"], "No such file or directory: 'missing.pt'"),
        (["convert", *of_mine("model"), "--input-format", "channels_last"], "are for saved models: name the files IN"),
        (["convert", *of_mine("linear"), "--strict"], "no 2D or 3D convolution was found"),
    ],
)
def test_errors_are_one_line(arguments, message, run):
    assert_one_line(run(*arguments), message)


def test_with_debug_an_error_shows_where_it_happened(run):
    code, _, error = run("--debug", "trace", *of_mine("broken"))
    assert code == 2
    assert "Traceback" in error
    assert 'return {}["x"]' in error


def test_ctrl_c_ends_with_130(run):
    assert run("trace", *of_mine("interrupted")) == (130, "", "torch-nhwc: interrupted\n")


def in_a_process(*arguments, **options):
    command = [sys.executable, "-W", "ignore", "-m", "torch_nhwc", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


# A program that says what it imported of some packages, and how many seconds of CPU it took.
IMPORTING = """
import resource, sys
from torch_nhwc_cli import main
sys.argv = ["torch-nhwc", *sys.argv[1:]]
try:
    main()
finally:
    print(*sorted({"torch", "torch._dynamo", "sympy"} & sys.modules.keys()), sep=",", file=sys.stderr)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime, file=sys.stderr)
"""


def imported_by(*arguments, **options):
    """Return what a command prints to the standard error, the packages that it imported, and its seconds of CPU."""
    command = [sys.executable, "-W", "ignore", "-c", IMPORTING, *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, **options)
    *errors, names, seconds = ran.stderr.splitlines()
    return "\n".join(errors), names.split(",") if names else [], float(seconds)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--help"], ""),
        (["tune", "--help"], ""),
        (["plan", "--nothing"], "No such option: --nothing"),
        (["trace"], "name one model, by --model or --factory"),
        (["tune", *of_mine("losing"), "--autocast", "int8"], "--autocast: expected one of float64"),
        (["convert", "model.pt"], "name the file to write"),
        (["tune", "model.pt"], "A model is named by --factory module:callable or --model; files are for"),
        (["--version"], ""),
    ],
)
def test_help_and_errors_of_options_do_not_wait_for_torch(arguments, message):
    error, imported, seconds = imported_by(*arguments)
    assert message in error
    assert imported == []
    assert seconds < 0.8  # 0.4 where nothing else runs


@pytest.mark.parametrize("command", [["plan"], *map(exhaustive, (["verify"], ["trace", "--convert"], ["convert"]))])
def test_the_compiler_is_not_imported_where_nothing_is_compiled(command, tmp_path):
    (tmp_path / "my_model.py").write_text(MY_MODEL)
    error, imported, _ = imported_by(*command, "--factory", "my_model:build", cwd=tmp_path)
    assert (error, imported) == ("", ["torch"])


@pytest.mark.parametrize("spelling", ["bf16", "bfloat16", "torch.bfloat16", "BF16"])
def test_dtypes_are_spelled_as_pytorch_and_its_users_do(spelling, run):
    assert options.dtype_name(spelling, "--dtype") == "bfloat16"
    for other in ("fp16", "half", "float16", "torch.half"):
        assert options.dtype_name(other, "--dtype") == "float16"
    code, out, _ = run("plan", *of_mine("losing"), "--dtype", spelling, "--json")
    assert (code, torch_nhwc.Plan.from_json(out).rows[0].dtype) == (0, "torch.bfloat16")


def test_the_built_in_models_are_those_that_the_options_name():
    assert tuple(models.MODELS) == options.MODELS


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [("typer", ["plan"], "cli"), exhaustive("transformers", ["plan", "--model", "resnet50"], "models")],
)
def test_a_missing_extra_is_named_in_one_sentence_and_env_works_without(missing, arguments, extra, tmp_path):
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('gone', name={missing!r})")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    ran = in_a_process(*arguments, env=environment)
    assert ran.returncode == 2
    assert ran.stderr.strip().endswith(f"{missing} is missing: type `pip install 'torch-nhwc[{extra}]'`")
    assert "Traceback" not in ran.stderr
    assert in_a_process("env", env=environment).returncode == 0


def test_what_the_package_of_a_built_in_model_warns_of_is_left_out(run, monkeypatch):
    def noisy():
        logging.getLogger("torchao").warning("Failed to load")
        warnings.warn("deprecated", stacklevel=1)
        return models.Example("noisy", nn.Conv2d(3, 4, 3), torch.randn(1, 3, 8, 8))

    monkeypatch.setitem(models.MODELS, "resnet50", noisy)
    code, out, error = run("plan", "--model", "resnet50")
    assert (code, error) == (0, "")
    assert "1 to convert" in out
    assert logging.root.manager.disable == 0


@pytest.mark.parametrize("name", [*map(exhaustive, models.MODELS)])
def test_built_in_models_convert_with_unchanged_outputs(name, run):
    code, out, _ = run("convert", "--model", name)
    assert code == 0
    assert "Outputs are within the tolerance" in out


NAMES = ["trace", "tune", "verify", "plan", "convert", "audit", "env"]
MY_MODEL = """
import torch


def build():
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.Softmax2d(), torch.nn.Conv2d(16, 8, 3))
    return model, torch.randn(1, 3, 32, 32)
"""


def test_the_help_lists_every_command_and_the_exit_codes(run):
    _, out, _ = run("--help")
    for name in NAMES:
        assert re.search(rf"│ {name} +\w", out)
    assert "ends with 0 if all is well" in " ".join(out.split())


@pytest.mark.parametrize("name", [*some_of(NAMES, "trace", "plan", "env")])
def test_the_example_in_the_help_of_a_command_runs(name, run, tmp_path):
    (tmp_path / "my_model.py").write_text(MY_MODEL)
    with torch.profiler.profile(record_shapes=True) as profile:
        nn.Conv2d(3, 8, 3)(torch.randn(2, 3, 8, 8))
    profile.export_chrome_trace("profile.json.gz")
    (example,) = re.findall(rf"For example: torch-nhwc ({name}.*?)\s*$", run(name, "--help")[1], re.MULTILINE)
    budget = ["--budget", 1] if name == "tune" else []
    code, _, error = run(*example.split(), *budget)
    assert code == 0, error
