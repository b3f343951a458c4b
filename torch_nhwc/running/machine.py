"""Describe the machine, as measurements and reports of problems need it."""

import os
import platform
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torch_nhwc.ops import cpu_capability
from torch_nhwc.rendering import warn

# What describes a machine without deciding how fast it is.
_INCIDENTAL = ("platform", "python")


def multiplies_less() -> bool:
    """Return whether convolutions of three taps may be computed with fewer multiplications."""
    return os.environ.get("TORCH_NHWC_WINOGRAD") != "0"


def machine(device: torch.device | str = "cpu") -> dict[str, object]:
    """Return the versions, the processor, its settings and the GPUs as plain data.

    Args:
        device: The device whose name is the entry `device`. The entries of CUDA's libraries exist on a GPU only.

    Example:
        >>> from torch_nhwc.running.machine import machine
        >>> machine()["torch"] == torch.__version__
        True
    """
    device = torch.device(device)
    described: dict[str, object] = {
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "device": _processor(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": cpu_capability(),
        "torch's capability": torch.backends.cpu.get_cpu_capability(),
        "oneDNN": _onednn(),
        "fewer multiplications": multiplies_less(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "GPUs": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "CUDA": torch.version.cuda,
    }
    if device.type == "cuda":
        cudnn = torch.backends.cudnn
        described |= {
            "device": torch.cuda.get_device_name(device),
            "cuDNN": cudnn.version(),  # type: ignore[no-untyped-call, unused-ignore]
            "cudnn.benchmark": cudnn.benchmark,
            "cudnn.allow_tf32": cudnn.allow_tf32,
        }
    return described


def warn_if_tuned_elsewhere(described: Mapping[str, Any], device: torch.device) -> None:
    """Warn if a tuning on a device was measured under other conditions than those here; the message says which."""
    is_here = device.type != "cuda" or torch.cuda.is_available()
    here = machine(device if is_here else "cpu")
    changed = [
        f"{name}: {described.get(name)}, here {here.get(name)}"
        for name in {**described, **here}
        if name not in _INCIDENTAL and described.get(name) != here.get(name)
    ]
    if changed:
        warn(f"torch_nhwc: this was tuned under other conditions, tune again: {'; '.join(changed)}")


def _processor() -> str:
    """Return the processor's name as the system knows it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _onednn() -> str | None:
    found = re.search(r"oneDNN.*?v([\d.]+)|MKL-DNN v([\d.]+)", torch.__config__.show())
    return (found[1] or found[2]) if found else None
