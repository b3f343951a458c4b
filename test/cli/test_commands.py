"""The command line: what it reads, prints and refuses."""

import json
import os
import re
import subprocess
import sys

import pytest
import torch
from selection import exhaustive
from torch import nn

import torch_nhwc
from torch_nhwc.cli import commands, models


def command_line(*arguments, **options):
    command = [sys.executable, "-W", "ignore", "-m", "torch_nhwc", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


FACTORIES = """
import torch
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


class Scaled(nn.Conv2d):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.kernel = self._parameters.pop("weight")

    def __getattr__(self, name):
        if name == "weight" and "kernel" in self._parameters:
            return self.kernel * 2
        return super().__getattr__(name)


class Different(Two):
    def forward(self, image, scale=1.0):
        return super().forward(image, scale)["images"][0] + self.calls


def tensor():
    return Two(), torch.randn(2, 3, 8, 8)


def positional():
    return Two(), (torch.randn(2, 3, 8, 8), 3)


def keywords():
    return Two(), {"image": torch.randn(2, 3, 8, 8), "scale": 2.0}


def model():
    return Two()


def scaled():
    return nn.Sequential(nn.Conv2d(3, 4, 3), Scaled(4, 4, 3))


def different():
    return Different(), torch.randn(2, 3, 8, 8)


def lazy():
    return nn.Sequential(nn.LazyConv2d(4, 3)), torch.randn(2, 3, 8, 8)


def scripted():
    return torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3))), torch.randn(2, 3, 8, 8)


def volume():
    return nn.Conv3d(3, 4, 3)


def shape():
    return Two(), (2, 3, 8, 8)


def wrong():
    return Two(), torch.randn(2, 4, 8, 8)


def without_module():
    return 3


def ends():
    raise SystemExit(0)


def varies():
    class Varies(Two):
        def forward(self, image):
            self.calls += 1
            return [super().forward(image)["images"][0]] * self.calls

    return Varies(), torch.randn(2, 3, 8, 8)


def not_a_number():
    class NotANumber(Two):
        def forward(self, image):
            return super().forward(image)["images"][0] * float("nan")

    return NotANumber(), torch.randn(2, 3, 8, 8)


def linear():
    return nn.Linear(3, 3), torch.randn(2, 3)


def flat():
    return nn.Linear(3, 3)


def frozen():
    layer = nn.Conv2d(3, 4, 3)
    layer.weight = nn.Parameter(torch.randn(216)[108:].view(4, 3, 3, 3))
    return layer


def needs_width(width):
    return Two()


def nested():
    return Two(), ((2, 3, 8, 8),)


class Chatty(nn.Conv2d):
    def forward(self, x):
        print("in forward")
        return super().forward(x)


def chatty():
    print("loading weights")
    return Chatty(3, 8, 3), torch.randn(2, 3, 8, 8)


instance = Two()


def broken():
    return {}["x"]
"""


@pytest.fixture
def here(tmp_path, monkeypatch, capfd):
    """Runs commands in this process, in a folder that has a module with factories; their end, output and errors."""
    (tmp_path / "of_mine.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", os.getcwd())])
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.delitem(sys.modules, "of_mine", raising=False)

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            commands.app([*map(str, arguments)])
        read = capfd.readouterr()
        return ended.value.code, read.out, read.err

    return run


def of_mine(name):
    return ["--factory", f"of_mine:{name}"]


def assert_one_line(run, message):
    code, _, error = run
    assert code == 2
    assert error.startswith("torch-nhwc: ")
    assert message in error
    assert len(error.splitlines()) == 1


def test_the_demo_reads_a_factory_and_prints_json(here):
    arguments = ["demo", *of_mine("scaled"), "--json", "--repeats", 1]
    _, out, _ = here(*arguments, "--input-shape", "1,3,8,8")
    (result,) = json.loads(out)
    assert result["unchanged"]
    assert result["converted"] == {"sites": 1, "bytes": 432}
    assert len(result["left"]) == 1
    assert "computed from other tensors" in result["left"][0]
    assert set(result["measurable"].values()) == {False}  # of one run each nothing can be said
    assert_one_line(here(*arguments), "comes without inputs: name a shape with --input-shape")


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_the_command_line_reads_torchscript_and_prints_a_table(tmp_path):
    torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv3d(2, 2, 3))[:1]).save(tmp_path / "model.pt")
    run = command_line(
        "demo", "--torchscript", tmp_path / "model.pt", "--input-shape", "1,3,8,8", "--repeats", 1,
        env=os.environ | {"COLUMNS": "100"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "1 weight, 432 bytes" in run.stdout
    assert "0 weights, 0 bytes" in run.stdout
    assert re.search(r", cpu, (1 thread|\d+ threads) ", " ".join(run.stdout.split()))
    assert "torch.nn.utils skips TorchScript layers" in run.stdout
    assert "equal bit for bit" in run.stdout
    assert " ".join(run.stdout.split()).count("no measurable difference") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda:99"], "'cuda:99' cannot be used"),
        exhaustive(["--device", "abacus"], "'abacus' cannot be used"),
        (["--torchscript", "x.pt", "--factory", "a:b", "--input-shape", "1"], "name one model, by --model"),
        exhaustive(
            ["--input-shape", "1,-3"],
            "expected sizes such as 1,3,224,224 or pixel_values=1,3,224,224:float32, got '1,-3'",
        ),
        exhaustive(["--dtype", "int8"], "expected one of float64, float32, float16, bfloat16, got 'int8'"),
        (["--model", "alexnet"], "expected one of resnet50, unet3d, video-autoencoder, got 'alexnet'"),
        exhaustive(["--torchscript", "x.pt"], "x.pt is not a TorchScript archive"),
        exhaustive(
            ["--model", "resnet50", "--factory", "a:b"],
            "name one model, by --model, --factory, --torchscript or --pickle",
        ),
        (["--input-shape", "a,b"], "expected sizes such as 1,3,224,224 or pixel_values=1,3,224,224:float32, got 'a,b'"),
    ],
)
def test_bad_arguments_end_in_one_sentence(arguments, message, here):
    assert_one_line(here("demo", *arguments), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--factory", "json:nothing"], "expected module:callable, got 'json:nothing'"),
        exhaustive(["--factory", "no_such_module:f"], "expected module:callable, got 'no_such_module:f'"),
        exhaustive(["--factory", "json"], "expected module:callable, got 'json'"),
        (["--factory", "of_mine:without_module"], "to return a module, or a module and its inputs"),
        (["--torchscript", __file__, "--input-shape", "1"], "is not a TorchScript archive"),
    ],
)
def test_models_that_cannot_be_had_end_in_one_sentence(arguments, message, here):
    assert_one_line(here("demo", *arguments), message)


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_env_tells_what_a_bug_report_needs(option, here):
    _, out, _ = here("env", *option)
    for word in (torch_nhwc.__version__, torch.__version__, "cxx_compiler", "CPU capability", "cuda_architectures"):
        assert word in out


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("typer", ["demo"], "cli"),
        exhaustive("rich", ["demo"], "cli"),
        exhaustive("transformers", ["demo", "--model", "resnet50"], "models"),
    ],
)
def test_a_missing_extra_is_named_in_one_sentence(missing, arguments, extra, tmp_path):
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('gone', name={missing!r})")
    run = command_line(*arguments, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert run.returncode == 2
    assert run.stderr.strip().endswith(f"{missing} is missing: type `pip install 'torch-nhwc[{extra}]'`")
    assert "Traceback" not in run.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize("missing", ["typer", "rich", "transformers"])
def test_env_goes_without_any_extra(missing, tmp_path):
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('gone', name={missing!r})")
    assert command_line("env", env=os.environ | {"PYTHONPATH": str(tmp_path)}).returncode == 0


def test_the_demo_names_the_packages_that_are_missing(here, monkeypatch):
    def missing():
        raise ModuleNotFoundError("gone", name="monai")

    monkeypatch.setattr(models, "MODELS", dict.fromkeys(models.MODELS, missing))
    code, _, error = here("demo")
    assert code == 2
    why = "monai is missing: type `pip install 'torch-nhwc[models]'`"
    assert error.splitlines() == [f"without resnet50, because {why}", f"torch-nhwc: {why}"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("missing", [("monai",), ("monai", "transformers")])
def test_the_demo_goes_without_models_whose_packages_are_missing_unless_all_are(missing, tmp_path):
    for name in missing:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('gone', name={name!r})")
    run = command_line("demo", "--repeats", 1, "--json", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert "monai is missing: type `pip install 'torch-nhwc[models]'`" in run.stderr
    assert "Traceback" not in run.stderr
    assert run.returncode == 2 * (len(missing) - 1)
    if run.returncode == 0:
        assert [result["model"] for result in json.loads(run.stdout)] == ["ResNet-50 (transformers)"]


@pytest.mark.parametrize("command", [["plan"], ["trace", "--convert"], ["convert"], ["tune", "--budget", "0.1"]])
def test_what_the_user_s_code_prints_is_no_part_of_the_json(command, here):
    code, out, errors = here(*command, *of_mine("chatty"), "--json")
    assert code == 0
    json.loads(out)
    assert "loading weights" in errors
    assert "in forward" in errors


class TestPlan:
    """`torch-nhwc plan`."""

    @pytest.mark.parametrize("name", ["tensor", *map(exhaustive, ("positional", "keywords"))])
    def test_prints_what_would_happen_to_the_weights_that_inputs_show(self, name, here):
        code, out, _ = here("plan", *of_mine(name))
        assert code == 0
        assert out.splitlines() == [
            "2 weights would be channels-last: 2 to move (3.2 kB), 0 left.",
            "PyTorch's group norm on a CPU is inaccurate on channels-last, the more the farther means lie from zero: "
            "exchange the layers by --preserve",
            "(Every row: --table)",
        ]

    def test_takes_what_convert_takes(self, here):
        _, out, _ = here("plan", *of_mine("model"), "--preserve", "--each-forward", "--dtype", "bfloat16", "--table")
        lines = out.splitlines()
        assert lines[0] == "1 weight would be converted in each forward, 0 left."
        assert "--table" not in out
        assert lines[1].startswith("1 GroupNorm to exchange")
        assert lines[2].startswith("converted in each forward: up to 432 bytes of new memory")
        assert lines[-3].split() == ["layers.1", "Conv2d", "8x3x3x3", "each_forward"]
        code, out, _ = here("plan", *of_mine("volume"), "--memory-format", "channels_last", "--json")
        read = torch_nhwc.Plan.from_json(out)
        assert code == 0
        assert [(row.dtype, row.reason.name) for row in read.rows] == [("torch.float32", "OTHER_RANK")]

    def test_of_a_lazy_model_makes_no_weights(self, here):
        _, out, _ = here("plan", *of_mine("lazy"))
        assert out.startswith("1 weight has no shape yet")


@pytest.mark.filterwarnings("ignore:.torch.jit")
class TestConvert:
    """`torch-nhwc convert`."""

    @pytest.mark.parametrize("name", ["keywords", *map(exhaustive, ("tensor", "positional"))])
    def test_prints_the_report_compares_outputs_and_writes_the_state_dict(self, name, here, tmp_path):
        code, out, _ = here("convert", *of_mine(name), "--out", "converted.pt", "--preserve")
        assert code == 0
        lines = out.splitlines()
        assert lines[0] == "2 weights are channels-last: 2 moved (3.2 kB), 0 left."
        assert re.fullmatch(r"Outputs are within the tolerance \S+: the largest difference is .*", lines[-2])
        assert lines[-1] == ("Written to converted.pt: state dict, to be loaded by load_state_dict(..., assign=True).")
        state_dict = torch.load("converted.pt")
        assert state_dict["kernel"].stride() == (72, 1, 24, 8)
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["converted.pt", "of_mine.py"]

    def test_names_options_where_the_report_names_arguments(self, here):
        _, out, _ = here("convert", *of_mine("tensor"))
        assert "exchange the layers by --preserve\n" in out
        _, out, _ = here("convert", *of_mine("frozen"))
        assert "or --each-forward takes it as it is" in out
        assert "=True" not in out

    @pytest.mark.parametrize("command", ["plan", "convert"])
    def test_asks_for_inputs_only_where_there_are_none(self, command, here):
        _, out, _ = here(command, *of_mine("flat"))
        assert "No 2D or 3D convolution was found. Layers" in out
        assert "show only where the model runs: give --input-shape.\n" in out
        _, out, _ = here(command, *of_mine("flat"), "--input-shape", "2,3")
        assert out.splitlines()[0] == "No 2D or 3D convolution was found."

    def test_finds_the_classes_of_a_file_that_is_trusted_here(self, here, tmp_path):
        (tmp_path / "of_here.py").write_text("import torch\nclass Net(torch.nn.Conv2d):\n    pass\n")
        save = "import torch, of_here; torch.save(of_here.Net(3, 4, 3), 'net.pt')"
        subprocess.run([sys.executable, "-c", save], check=True, cwd=tmp_path)
        assert here("convert", "net.pt", "out.pt", "--allow-pickle")[0] == 0

    def test_writes_an_archive_of_a_torchscript_model(self, here):
        assert here("convert", *of_mine("scripted"), "--out", "converted.pt")[0] == 0
        assert torch.jit.load("converted.pt").state_dict()["0.weight"].stride() == (27, 1, 9, 3)
        arguments = ["--torchscript", "converted.pt", "--memory-format", "contiguous_format", "--out", "again.pt"]
        code, out, _ = here("convert", *arguments)
        assert code == 0
        assert "Outputs were not compared: the model has no inputs here" in out
        assert torch.jit.load("again.pt").state_dict()["0.weight"].is_contiguous()

    def test_writes_nothing_where_outputs_differ(self, here, tmp_path):
        code, out, _ = here("convert", *of_mine("different"), "--out", "converted.pt")
        assert code == 1
        assert "Outputs are BEYOND the tolerance" in out
        assert not (tmp_path / "converted.pt").exists()

    def test_leaves_a_file_as_it_was_when_writing_fails(self, here, tmp_path, monkeypatch):
        def fail(_, file):
            file.write(b"half")
            raise OSError("no space left")

        (tmp_path / "converted.pt").write_text("before")
        monkeypatch.setattr(torch, "save", fail)
        code, _, error = here("convert", *of_mine("model"), "--out", "converted.pt")
        assert code == 2
        assert "no space left" in error
        assert (tmp_path / "converted.pt").read_text() == "before"
        assert not list(tmp_path.glob(".torch_nhwc-*"))

    def test_converts_a_lazy_model_behind_its_first_forward(self, here):
        code, out, _ = here("convert", *of_mine("lazy"), "--table")
        assert code == 0
        assert "0     Conv2d  4x3x3x3  in place" in out.splitlines()

    def test_converts_a_file_into_another_of_its_kind(self, here, tmp_path):
        torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3))).save(tmp_path / "model.pt")
        code, out, _ = here("convert", "model.pt", "out.pt", "--input-format", "channels_last", "--table")
        assert code == 0
        lines = out.splitlines()
        assert lines[0] == "1 weight is channels-last: 1 moved (432 bytes), 0 left."
        assert "0     Conv2d  4x3x3x3  in place" in lines
        assert lines[-1] == "Written to out.pt."
        converted = torch.jit.load("out.pt")
        assert converted.state_dict()["0.weight"].stride() == (27, 1, 9, 3)
        assert converted(torch.randn(2, 3, 8, 8)).is_contiguous(memory_format=torch.channels_last)
        code, out, _ = here("convert", "out.pt", "out.pt", "--memory-format", "contiguous_format", "--json")
        assert (code, json.loads(out)["memory_format"]) == (0, "contiguous_format")
        assert torch.jit.load("out.pt").state_dict()["0.weight"].is_contiguous()

    def test_loads_what_may_run_code_where_it_is_allowed(self, here, tmp_path):
        torch.save(nn.Sequential(nn.Conv2d(3, 4, 3)), tmp_path / "model.pt")
        message = "may run code that is in it: if you trust the file, --allow-pickle loads it"
        assert_one_line(here("convert", "model.pt", "out.pt"), message)
        assert here("convert", "model.pt", "out.pt", "--allow-pickle")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "name one model, by --model, --factory, --torchscript or --pickle"),
        (["plan", "--model", "alexnet"], "--model: expected one of resnet50, unet3d, video-autoencoder, got 'alexnet'"),
        (["plan", *of_mine("model"), "--memory-format", "nhwc"], "expected memory_format to be None or one of"),
        (["plan", *of_mine("model"), "--dtype", "int8"], "--dtype: expected one of float64, float32"),
        (["convert", "model.pt"], "a saved model: expected the files IN and OUT"),
        (
            ["convert", "model.pt", "out.pt", *of_mine("model"), "--preserve"],
            "a saved model: expected the files IN and OUT, without --factory, --preserve",
        ),
        (["convert", "of_mine.py", "out.pt"], "of_mine.py: expected a TorchScript archive, an exported program or a"),
        (["convert", "missing.pt", "out.pt"], "No such file or directory: 'missing.pt'"),
        (
            ["convert", *of_mine("model"), "--input-format", "channels_last"],
            "--input-format is for saved models: name the files IN and OUT",
        ),
        (["convert", *of_mine("shape")], "expected example_inputs to be tensors, got the shape (2, 3, 8, 8)"),
        (["convert", *of_mine("wrong")], "RuntimeError in conv.py, line"),
        (["convert", *of_mine("broken")], f"KeyError in of_mine.py, line {len(FACTORIES.splitlines())}: 'x'"),
        (["convert", *of_mine("model"), "--out", "nowhere/x.pt"], "--out: expected a file in a folder that is there"),
        (
            ["convert", *of_mine("volume"), "--memory-format", "channels_last", "--strict"],
            "torch-nhwc: nothing to convert in the",
        ),
        (
            ["convert", *of_mine("linear"), "--strict"],
            "no 2D or 3D convolution was found (nothing was changed, since --",
        ),
        (["convert", *of_mine("flat"), "--strict"], "show only where the model runs: give --input-shape (nothing was"),
        (
            ["plan", *of_mine("needs_width")],
            "--factory: of_mine:needs_width has to work without arguments: missing a required argument: 'width'",
        ),
        *(
            (
                [command, *of_mine("nested")],
                "torch-nhwc: expected example_inputs to be tensors, got the shape (2, 3, 8, 8)",
            )
            for command in ("plan", "convert")
        ),
        (["convert", *of_mine("varies")], "the model returned 2 floating tensors in one call and 6 in the next"),
        (["convert", *of_mine("not_a_number")], "the model returns NaN or infinity before the conversion already"),
        (["plan", *of_mine("instance")], "--factory: expected module:callable, a function that returns a model, got a"),
        (["plan", *of_mine("ends")], "--factory: of_mine:ends ends the program (SystemExit(0))"),
        (["plan", "--factory", "./of_mine.py:model"], "--factory: expected module:callable, with a module as import"),
    ],
)
def test_errors_of_plan_and_convert_are_one_line(arguments, message, here):
    assert_one_line(here(*arguments), message)
