"""The command line: what it reads, prints and refuses."""

import json
import os
import subprocess
import sys

import pytest
import torch
from selection import exhaustive
from torch import nn

import torch_nhwc

# This file is the module whose factories the command line is given, and it imports what all tests share.
WITH_THE_FACTORIES = os.environ | {"PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path])}


def command_line(*arguments, **options):
    command = [sys.executable, "-W", "ignore", "-m", "torch_nhwc", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


class Scaled(nn.Conv2d):
    """Computes its weight in a way of its own."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.kernel = self._parameters.pop("weight")

    def __getattr__(self, name):
        if name == "weight" and "kernel" in self._parameters:
            return self.kernel * 2
        return super().__getattr__(name)


def factory():
    """What `--factory` calls below."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), Scaled(4, 4, 3))


def factory_without_module():
    """Returns something else."""
    return 3


def test_the_command_line_reads_a_factory_and_prints_json():
    arguments = ["demo", "--factory", "test_commands:factory", "--json", "--repeats", 1]
    run = command_line(*arguments, "--input-shape", "1,3,8,8", env=WITH_THE_FACTORIES)
    (result,) = json.loads(run.stdout)
    assert result["unchanged"]
    assert result["converted"] == {"sites": 1, "bytes": 432}
    assert len(result["left"]) == 1
    assert "computed from other tensors" in result["left"][0]
    run = command_line(*arguments, env=WITH_THE_FACTORIES)
    assert run.returncode == 1
    assert "name its shape with --input-shape" in run.stderr


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_the_command_line_reads_torchscript_and_prints_a_table(tmp_path):
    torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv3d(2, 2, 3))[:1]).save(tmp_path / "model.pt")
    run = command_line(
        "demo", "--torchscript", tmp_path / "model.pt", "--input-shape", "1,3,8,8", "--repeats", 1,
        env=os.environ | {"COLUMNS": "100"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "1 weights, 0.0 MB" in run.stdout
    assert "torch.nn.utils skips TorchScript layers" in run.stdout
    assert "equal bit for bit" in run.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda:99"], "'cuda:99' cannot be used"),
        exhaustive(["--device", "abacus"], "'abacus' cannot be used"),
        (["--torchscript", "x.pt", "--factory", "a:b", "--input-shape", "1"], "name two models"),
        exhaustive(["--input-shape", "1,-3"], "expected sizes such as 1,3,224,224, got '1,-3'"),
        exhaustive(["--dtype", "int8"], "expected one of float64, float32, float16, bfloat16, got 'int8'"),
        (["--model", "alexnet"], "expected one of resnet50, unet3d, video-autoencoder, got 'alexnet'"),
        exhaustive(["--torchscript", "x.pt"], "--torchscript needs --input-shape"),
        (["--input-shape", "a,b"], "expected sizes such as 1,3,224,224, got 'a,b'"),
    ],
)
def test_bad_arguments_end_in_one_sentence(arguments, message):
    run = command_line("demo", *arguments, env=os.environ | {"COLUMNS": "200", "TERM": "dumb"})
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--factory", "json:nothing"], "expected module:callable, got 'json:nothing'"),
        exhaustive(["--factory", "no_such_module:f"], "expected module:callable, got 'no_such_module:f'"),
        exhaustive(["--factory", "json"], "expected module:callable, got 'json'"),
        (["--factory", "test_commands:factory_without_module"], "to return a module, or a module and its input tensor"),
        (["--torchscript", __file__, "--input-shape", "1"], "is not a TorchScript archive"),
    ],
)
def test_models_that_cannot_be_had_end_in_one_sentence(arguments, message):
    run = command_line("demo", *arguments, env=WITH_THE_FACTORIES)
    assert run.returncode == 1
    assert message in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_env_tells_what_a_bug_report_needs(option):
    run = command_line("env", *option)
    for word in (torch_nhwc.__version__, torch.__version__, "cxx_compiler", "CPU capability", "cuda_architectures"):
        assert word in run.stdout


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("typer", ["demo"], "cli"),
        exhaustive("rich", ["demo"], "cli"),
        ("transformers", ["demo", "--model", "resnet50"], "models"),
    ],
)
def test_a_missing_extra_is_named_in_one_sentence(missing, arguments, extra, tmp_path):
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('gone', name={missing!r})")
    run = command_line(*arguments, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert run.returncode == 1
    assert run.stderr.strip().endswith(f"{missing} is missing: type `pip install 'torch-nhwc[{extra}]'`")
    assert "Traceback" not in run.stderr
    run = command_line("env", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert run.returncode == 0


@pytest.mark.parametrize("missing", [exhaustive(("monai",)), ("monai", "transformers")])
def test_the_demo_goes_without_models_whose_packages_are_missing_unless_all_are(missing, tmp_path):
    for name in missing:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('gone', name={name!r})")
    run = command_line("demo", "--repeats", 1, "--json", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert "monai is missing: type `pip install 'torch-nhwc[models]'`" in run.stderr
    assert "Traceback" not in run.stderr
    assert run.returncode == len(missing) - 1
    if run.returncode == 0:
        assert [result["model"] for result in json.loads(run.stdout)] == ["ResNet-50 (transformers)"]
