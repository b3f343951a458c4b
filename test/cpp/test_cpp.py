"""C++ users: public headers, the filter transpose by itself, a LibTorch program, and the CUDA sources' compiler."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import cuda_build
import pytest
import torch
from torch.utils import cpp_extension

import torch_nhwc as nhwc

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
INCLUDE = Path(nhwc.include_paths()[0])
HEADERS = sorted(path.relative_to(INCLUDE).as_posix() for path in INCLUDE.rglob("*.h"))
CXX = os.environ.get("CXX", "c++")
TORCH_FREE = ["torch_nhwc/filter_transpose.h", "torch_nhwc/version.h"]


def compile_alone(header, standard, folder, *flags):
    source = folder / "alone.cpp"
    source.write_text(f"#include <{header}>\n#include <{header}>\n")
    command = [CXX, f"-std={standard}", "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{INCLUDE}"]
    subprocess.run([*command, *flags, str(source)], check=True)


@pytest.mark.parametrize("header", TORCH_FREE)
def test_torch_free_headers_compile_alone_as_cpp17_without_torch(header, tmp_path):
    compile_alone(header, "c++17", tmp_path)


@pytest.mark.parametrize("header", HEADERS)
def test_every_public_header_compiles_alone(header, tmp_path):
    # torch's own headers want C++20 from 2.12 on; ours are clean under C++17 wherever torch's are.
    standard = "c++17" if torch.__version__ < "2.12" else "c++20"
    system = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    compile_alone(header, standard, tmp_path, *system)


def test_the_version_macro_is_the_packages_version(tmp_path):
    numbers = dict.fromkeys(["MAJOR", "MINOR", "PATCH"])
    for line in (INCLUDE / "torch_nhwc/version.h").read_text().splitlines():
        for name in numbers:
            if line.startswith(f"#define TORCH_NHWC_VERSION_{name} "):
                numbers[name] = line.split()[-1]
    assert ".".join(numbers.values()) == nhwc.__version__


def test_the_filter_transpose_stands_alone_under_the_sanitizers(tmp_path):
    program = tmp_path / "filter_transpose"
    flags = ["-std=c++17", "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover", "-Wall", "-Wextra"]
    subprocess.run(
        [CXX, *flags, "-Werror", f"-I{INCLUDE}", str(HERE / "filter_transpose.cpp"), "-o", program], check=True
    )
    run = subprocess.run([program], check=True, capture_output=True, text=True)
    assert run.stdout == "ok\n"


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_a_libtorch_program_uses_the_operators_without_python(tmp_path):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 3, 3, 3))

        def forward(self, x):
            return torch.nn.functional.conv2d(x, torch.ops.nhwc.convert_weight(self.weight))

    torch.jit.script(Layer()).save(tmp_path / "layer.pt")
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    assert cmake, "cmake is among the requirements of the extra `test`"
    configure = [cmake, "-S", HERE, "-B", tmp_path / "build", "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}", f"-DTORCH_NHWC_INCLUDE={INCLUDE}"]
    configure += [f"-DTORCH_NHWC_LIBRARY={nhwc.library_path()}"]
    if torch.version.cuda:
        root = cuda_build.toolkit()
        configure += [f"-DCMAKE_CUDA_COMPILER={root / 'bin/nvcc'}", f"-DCUDA_TOOLKIT_ROOT_DIR={root}"]
        configure += [f"-DCUDA_nvrtc_LIBRARY={cuda_build.library('nvrtc')}"]  # which a small toolkit lacks
    subprocess.run(configure, check=True)
    subprocess.run([cmake, "--build", tmp_path / "build", "--parallel", "2"], check=True)
    program = tmp_path / "build" / "consumer"
    assert "libpython" not in subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
    command = [program, tmp_path / "layer.pt"]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=cuda_build.environment())
    assert run.stdout == "ok\n"


def test_the_library_needs_no_python():
    needed = subprocess.run(["readelf", "-d", nhwc.library_path()], check=True, capture_output=True, text=True).stdout
    assert "libtorch_cpu" in needed
    assert "libgomp" in needed  # without OpenMP at::parallel_for runs on one thread, and says nothing
    assert "python" not in needed
    symbols = subprocess.run(["nm", "-D", nhwc.library_path()], check=True, capture_output=True, text=True).stdout
    assert not re.search(r" U _?Py", symbols)


@pytest.mark.parametrize("architecture", ["80", "90", "100"])
def test_the_cuda_sources_compile(architecture, tmp_path):
    """Against the headers of any torch, a CPU build included. Where nvcc is promised, its absence fails."""
    root = cuda_build.toolkit()
    if root is None:
        assert os.environ.get("TORCH_NHWC_REQUIRE_NVCC") != "1", "nvcc is promised here, and not found"
        pytest.skip("needs nvcc")
    sources = sorted((ROOT / "csrc/cuda").glob("*.cu"))
    assert sources
    system = [flag for path in [*cpp_extension.include_paths(), root / "include"] for flag in ("-isystem", str(path))]
    for source in sources:
        command = [root / "bin/nvcc", "-c", source, "-o", tmp_path / f"{source.stem}.o", "-std=c++20", "-O3"]
        command += ["--Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra,-Werror,-fPIC", f"-I{INCLUDE}"]
        command += [
            "-DC10_USING_CUSTOM_GENERATED_MACROS",
            f"-gencode=arch=compute_{architecture},code=sm_{architecture}",
        ]
        subprocess.run([*command, *system], check=True)
