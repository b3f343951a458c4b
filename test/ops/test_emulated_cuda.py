"""The CUDA operators from end to end without a GPU, on a CUDA runtime that runs on the CPU.

The tests are in emulated_cuda.py, the runtime that is preloaded in cpp/emulated_cuda.cpp.
"""

import os
import subprocess
import sys
from pathlib import Path

import cuda_build
import pytest
import torch

import torch_nhwc as nhwc

HERE = Path(__file__).parent
CXX = os.environ.get("CXX", "c++")


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the emulated runtime for the CUDA of torch: structs and signatures change with its major versions."""
    if torch.version.cuda is None:
        pytest.skip("needs a CUDA build of torch")
    if nhwc.cpp_extension.build_info()["cuda"] is None:
        pytest.skip("needs the library built for CUDA")
    toolkit = cuda_build.toolkit()
    if toolkit is None or not torch.version.cuda.startswith("13."):
        pytest.skip(f"needs CUDA 13: its toolkit, here {toolkit}, and torch for it, here for {torch.version.cuda}")
    if torch.cuda.is_available():
        pytest.skip("the GPU of this machine is the better test")
    folder = tmp_path_factory.mktemp("emulated_cuda")
    # libcaffe2_nvrtc.so wants the address of every function of the driver that torch may ever call.
    wants = ["nm", "-D", "--undefined-only", Path(torch.__file__).parent / "lib/libcaffe2_nvrtc.so"]
    symbols = subprocess.run(wants, check=True, capture_output=True, text=True).stdout.split()
    names = {name.split("@")[0] for name in symbols if name.startswith("cu")} - {"cuDevicePrimaryCtxGetState"}
    not_supported = 801
    driver = (f'extern "C" int {name}() {{ return {not_supported}; }}\n' for name in sorted(names))
    (folder / "driver.cpp").write_text("".join(driver))
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"]
    flags += [f"-I{nhwc.cpp_extension.include_paths()[0]}", f"-I{cuda_build.ROOT / 'csrc'}"]
    flags += ["-isystem", toolkit / "include"]
    sources = [HERE.parent / "cpp/emulated_cuda.cpp", folder / "driver.cpp"]
    subprocess.run([CXX, *flags, *sources, "-o", folder / "libcuda.so.1"], check=True)
    return folder / "libcuda.so.1"


@pytest.mark.exhaustive
@pytest.mark.parametrize("memory", ["cached", "uncached"])
def test_the_operators_on_emulated_devices(memory: str, runtime: Path) -> None:
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if memory == "uncached" else {}
    environment = os.environ | uncached | {"LD_PRELOAD": str(runtime)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--capture=sys", HERE / "emulated_cuda.py"]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if run.returncode != 0:
        pytest.fail(run.stdout, pytrace=False)
