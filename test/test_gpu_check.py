"""The steps that only a GPU can answer, run dry on a machine without one."""

import json
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

gpu_check = import_module("gpu_check")


def run(monkeypatch, folder, *options):
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(folder), *options])
    code = gpu_check.main()
    return code, json.loads((folder / "summary.json").read_text())


def step(text, seconds=60):
    return gpu_check.Step((sys.executable, "-c", text), seconds)


def test_each_step_leaves_what_it_said_and_how_it_ended(tmp_path, monkeypatch):
    steps = {
        "right": step("print('so much')"),
        "wrong": step("exit('no')"),
        "long": step("import time; time.sleep(9)", 1),
    }
    monkeypatch.setattr(gpu_check, "STEPS", steps)
    code, ended = run(monkeypatch, tmp_path)
    assert code == 1
    assert [(each["step"], each["code"], each["said"]) for each in ended] == [
        ("right", 0, "so much"),
        ("wrong", 1, "no"),
        ("long", None, ""),
    ]
    assert (tmp_path / "right.log").read_text() == "so much\n"


def test_a_step_that_does_not_fit_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "STEPS", {"right": step("print(1)")})
    assert run(monkeypatch, tmp_path, "--minutes", "0.1") == (1, [{"step": "right", "code": None, "seconds": 0}])


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
@pytest.mark.parametrize("name", ["layouts", "operators", "norms"])
def test_a_benchmark_says_that_there_is_no_gpu(name, tmp_path, monkeypatch):
    code, (ended,) = run(monkeypatch, tmp_path, "--step", name)
    assert (code, ended["code"]) == (1, 1)
    assert "built without CUDA" in ended["said"]
