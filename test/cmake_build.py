"""CMake projects of users, with the packages of the running interpreter."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cuda_build
import torch

import torch_nhwc as nhwc

PREFIXES = [torch.utils.cmake_prefix_path, nhwc.cmake_prefix_path]


def cmake():
    path = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    assert path, "cmake is among the requirements of the extra `test`"
    return path


def configure(source, build, prefixes=PREFIXES):
    """The command that configures a project."""
    command = [cmake(), "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={';'.join(prefixes)}"]
    if torch.version.cuda:
        root = cuda_build.toolkit()
        command += [f"-DCMAKE_CUDA_COMPILER={root / 'bin/nvcc'}", f"-DCUDA_TOOLKIT_ROOT_DIR={root}"]
        command += [f"-DCUDA_nvrtc_LIBRARY={cuda_build.library('nvrtc')}"]  # which a small toolkit lacks
    return command


def make_program(source, build, name):
    """Configures and builds a project; the path of its program, which needs no Python."""
    subprocess.run(configure(source, build), check=True)
    subprocess.run([cmake(), "--build", build], check=True)
    needed = subprocess.run(["ldd", build / name], check=True, capture_output=True, text=True).stdout
    assert "libtorch_nhwc" in needed
    assert "libpython" not in needed
    return build / name


def run_program(*command, **options):
    # The search path that CMake leaves in the program will do; only what torch needs for CUDA may lie elsewhere.
    environment = cuda_build.environment() if torch.version.cuda else None
    return subprocess.run(command, check=True, env=environment, **options)
