"""Under which conditions something was measured: the machine and its libraries, and what ran on it."""

import platform
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from torch_nhwc.version import __version__


def machine(device: torch.device) -> dict[str, object]:
    """The device, the libraries that work on it, and their settings, as plain data."""
    described: dict[str, object] = {
        "torch_nhwc": __version__,
        "torch": torch.__version__,
        "device": _processor(),
        "threads": torch.get_num_threads(),
        "instruction set": torch.backends.cpu.get_cpu_capability(),
        "oneDNN": _onednn(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cuda":
        cudnn = torch.backends.cudnn
        described |= {
            "device": torch.cuda.get_device_name(device),
            "CUDA": torch.version.cuda,
            "cuDNN": cudnn.version(),  # type: ignore[no-untyped-call, unused-ignore]
            "cudnn.benchmark": cudnn.benchmark,
            "cudnn.allow_tf32": cudnn.allow_tf32,
        }
    return described


def differences(then: Mapping[str, object], there: Mapping[str, object]) -> list[str]:
    """What differs between two descriptions, each in a few words."""
    return [
        f"{name}: {then.get(name)}, here {there.get(name)}"
        for name in {**then, **there}
        if then.get(name) != there.get(name)
    ]


def _processor() -> str:
    """As the system knows it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _onednn() -> str | None:
    found = re.search(r"oneDNN.*?v([\d.]+)|MKL-DNN v([\d.]+)", torch.__config__.show())
    return (found[1] or found[2]) if found else None
