"""What a report of a problem needs to say about the machine and the build."""

import platform
import sys

import torch

from torch_nhwc.library import build_info, library_path
from torch_nhwc.ops import cpu_capability
from torch_nhwc.version import __version__


def describe() -> dict[str, object]:
    """Versions, compilers and devices, as plain data."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "torch_nhwc": __version__,
        "library": library_path().name,
        "built with": dict(build_info()),
        "torch": torch.__version__,
        "torch's CUDA": torch.version.cuda,
        "GPUs": gpus,
        "torch's CPU capability": torch.backends.cpu.get_cpu_capability(),
        "CPU capability": cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
    }


def as_text() -> str:
    """`describe` in lines."""
    lines = []
    for name, value in describe().items():
        if isinstance(value, dict):
            lines += [f"{name}:", *(f"    {key}: {entry}" for key, entry in value.items())]
        else:
            lines.append(f"{name}: {value}")
    return "\n".join(lines)
