"""What C++ programs need in addition to torch where the library was built for CUDA."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import cpp_extension

import torch_nhwc as nhwc

ROOT = Path(__file__).parents[2]


def toolkit():
    """Return the CUDA toolkit that setup.py would use, or None."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from cuda_toolkit import find_cuda_toolkit
    finally:
        sys.path.pop(0)
    return find_cuda_toolkit()


def required_toolkit() -> Path:
    """Return the toolkit; without it skip the test, or fail where nvcc is required."""
    root = toolkit()
    if root is None:
        assert os.environ.get("TORCH_NHWC_REQUIRE_NVCC") != "1", "nvcc is required here, and not found"
        pytest.skip("needs nvcc")
    return root


def nvcc(source: Path, standard: str, architecture: str, *flags: Any) -> str:
    """Compile with warnings as errors. Return the compiler's output."""
    command = [required_toolkit() / "bin/nvcc", "-c", source, f"-std={standard}", "-O3"]
    command += [f"-I{path}" for path in nhwc.cpp_extension.include_paths()]
    command += ["--Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror,-fPIC"]
    command += [f"-gencode=arch=compute_{architecture},code=sm_{architecture}"]
    done = subprocess.run([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def kernels(name: str, architecture: str, folder: Path, *flags: Any) -> list[str]:
    """Compile one of the library's files of kernels. Return what the compiler says of each kernel."""
    flags = ("-Xptxas", "-v", f"-I{ROOT / 'csrc'}", "-o", folder / "kernels.o", *flags)
    report = nvcc(ROOT / f"csrc/cuda/{name}_kernels.cu", "c++17", architecture, *flags)
    return report.split("Compiling entry function ")[1:]


def torch_headers() -> list[str]:
    """Return the flags for torch's headers, also those of a build for the CPU."""
    paths = [*cpp_extension.include_paths(), str(required_toolkit() / "include")]
    return [flag for path in paths for flag in ("-isystem", path)] + ["-DC10_USING_CUSTOM_GENERATED_MACROS"]


def library(name):
    """Return a CUDA library by its name, from the toolkit or from torch's packages."""
    packages = Path(torch.__file__).parent.parent / "nvidia"
    for root in filter(None, (toolkit(), packages)):
        for path in sorted(root.rglob(f"lib{name}.so*")):
            return path
    return None


def environment():
    """Return the environment for programs, whose search path does not serve the libraries that they link."""
    folders = [Path(torch.__file__).parent / "lib"]
    if torch.version.cuda:
        folders.append(library("cudart").parent)
    return os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(map(str, folders))}
