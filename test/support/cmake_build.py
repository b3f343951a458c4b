"""CMake projects of users, with the packages of the running interpreter."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import cuda_build
import torch

import torch_nhwc as nhwc

PREFIXES = [torch.utils.cmake_prefix_path, nhwc.cpp_extension.cmake_prefix_path]


def cmake():
    path = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    assert path, "cmake is among the requirements of the extra `test`"
    return path


def configure(source, build, prefixes=PREFIXES):
    """Return the command that configures a project."""
    command = [cmake(), "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={';'.join(prefixes)}"]
    return command + cuda_options()


def cuda_options():
    """Return further options of a project where torch is a CUDA build."""
    if not torch.version.cuda:
        return []
    root = cuda_build.toolkit()
    nvrtc = f"-DCUDA_nvrtc_LIBRARY={cuda_build.library('nvrtc')}"  # which a small toolkit lacks
    return [f"-DCMAKE_CUDA_COMPILER={root / 'bin/nvcc'}", f"-DCUDA_TOOLKIT_ROOT_DIR={root}", nvrtc]


def make_program(source, build, name):
    """Configure and build a project. Return the path of its program, which needs no Python."""
    subprocess.run(configure(source, build), check=True)
    subprocess.run([cmake(), "--build", build], check=True)
    assert_needs_no_python(build / name)
    return build / name


def assert_needs_no_python(program, of_ours=True):
    needed = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    assert ("libtorch_nhwc" in needed) == of_ours
    assert "libpython" not in needed


def run_program(*command, **options):
    # CMake's search path in the program suffices; only torch's CUDA libraries may be elsewhere.
    return subprocess.run(command, check=True, env=environment(), **options)


def environment():
    return cuda_build.environment() if torch.version.cuda else None


def run_typed(lines, folder):
    """Run a document's command lines, in a folder, in the environment of the running interpreter."""
    options = shlex.join(cuda_options())
    typed = [f"{line} {options}" if line.startswith("cmake -S ") else line for line in lines]
    path = f"{Path(sys.executable).parent}:{Path(cmake()).parent}:{os.environ.get('PATH', '')}"
    script = "\n".join(["set -e", *typed])
    subprocess.run(["sh", "-c", script], check=True, cwd=folder, env=(environment() or os.environ) | {"PATH": path})
