"""The best that a copy through shared memory does on a device: shared_copy.cu, compiled where nvcc is."""

import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import machine
import torch
from torch import Tensor

SOURCE = Path(__file__).with_suffix(".cu")
VARIANTS = [(tile_bytes, is_asynchronous) for tile_bytes in (16 << 10, 32 << 10) for is_asynchronous in (False, True)]


def compile_command(nvcc: Path, architecture: str, library: Path) -> list[str]:
    flags = ["-std=c++17", "-O3", "-Werror=all-warnings", "-shared", "-Xcompiler=-fPIC", f"-arch={architecture}"]
    return [str(nvcc), *flags, str(SOURCE), "-o", str(library)]


def nvcc() -> Path | None:
    """Return the compiler that setup.py would use."""
    sys.path.insert(0, str(machine.ROOT / "tools"))
    try:
        from cuda_toolkit import find_cuda_toolkit
    finally:
        sys.path.pop(0)
    toolkit = find_cuda_toolkit()
    return toolkit / "bin/nvcc" if toolkit else None


def variants() -> dict[str, Callable[[Tensor, Tensor], None]]:
    """Return copies from the second tensor to the first, both of a multiple of 16 bytes; none without nvcc."""
    compiler = nvcc()
    if compiler is None:
        return {}
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "shared_copy.so"
        subprocess.run(compile_command(compiler, f"sm_{major}{minor}", library), check=True)
        function = ctypes.CDLL(str(library)).shared_copy
    pointer = ctypes.c_void_p
    function.argtypes = [pointer, pointer, ctypes.c_uint64, ctypes.c_uint, ctypes.c_int, pointer]

    def copy(out: Tensor, source: Tensor, tile_bytes: int, is_asynchronous: bool) -> None:
        assert source.nbytes % 16 == 0
        stream = torch.cuda.current_stream().cuda_stream
        error = function(source.data_ptr(), out.data_ptr(), source.nbytes, tile_bytes, is_asynchronous, stream)
        if error:
            raise RuntimeError(f"shared_copy.cu: CUDA error {error}")

    return {
        f"shared_copy_{tile_bytes >> 10}_KB{'_asynchronous' if is_asynchronous else ''}": (
            lambda out, source, tile_bytes=tile_bytes, is_asynchronous=is_asynchronous: copy(
                out, source, tile_bytes, is_asynchronous
            )
        )
        for tile_bytes, is_asynchronous in VARIANTS
    }
