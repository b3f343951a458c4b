"""Converted archives in a C++ program that is linked to LibTorch alone."""

import os
import subprocess
from pathlib import Path

import cuda_build
import pytest
import torch
from saved_files import Network
from torch.utils import cpp_extension

import torch_nhwc as nhwc

HERE = Path(__file__).parent
CXX = os.environ.get("CXX", "c++")


@pytest.mark.exhaustive  # to compile against TorchScript's headers takes half a minute
@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_converted_archives_run_with_equal_outputs(tmp_path):
    model, x = Network().eval(), torch.randn(2, 3, 8, 8)
    scripted = torch.jit.script(model)
    archives = {"scripted": scripted, "traced": torch.jit.trace(model, x), "frozen": torch.jit.freeze(scripted)}
    for name, each in archives.items():
        each.save(tmp_path / f"{name}.pt")
        for wanted in (None, "channels_last"):
            nhwc.convert_saved(tmp_path / f"{name}.pt", tmp_path / f"{name}-{wanted}.out", input_format=wanted)
    libraries = Path(torch.__file__).parent / "lib"
    flags = ["-std=c++20", "-O0", *(f"-isystem{folder}" for folder in cpp_extension.include_paths())]
    links = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run([CXX, *flags, HERE / "saved_archive.cpp", "-o", tmp_path / "program", *links], check=True)
    command = [tmp_path / "program", tmp_path / "scripted.pt", *sorted(tmp_path.glob("*.out"))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=cuda_build.environment())
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
    assert len(command) == 8
