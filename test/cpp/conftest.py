"""The program of module.cpp, built once."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

import torch_nhwc as nhwc

HERE = Path(__file__).parent
CXX = os.environ.get("CXX", "c++")


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    """Build the program as a project without CMake does."""
    path = tmp_path_factory.mktemp("module") / "module"
    libraries = Path(torch.__file__).parent / "lib"
    flags = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Werror"]
    flags += ["-include", "torch_nhwc/module.h"]  # first, so that it is seen to need no other header
    flags += [flag for folder in cpp_extension.include_paths() for flag in ("-isystem", folder)]
    flags += [f"-I{folder}" for folder in nhwc.cpp_extension.include_paths()]
    links = [
        "-Wl,--no-as-needed",
        nhwc.cpp_extension.library_path(),
        f"-Wl,-rpath,{nhwc.cpp_extension.library_path().parent}",
    ]
    links += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run([CXX, *flags, HERE / "module.cpp", "-o", path, *links], check=True)
    return path
