"""What a result must say about where it comes from."""

import json
import os
import platform
import subprocess
from pathlib import Path

import torch

from torch_nhwc import environment

ROOT = Path(__file__).parent.parent


def processor() -> str:
    """The processor's name as the system knows it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def caches() -> dict[str, str]:
    """The sizes of the caches of one CPU."""
    folders = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    return {
        f"L{(folder / 'level').read_text().strip()} {(folder / 'type').read_text().strip()}": (folder / "size")
        .read_text()
        .strip()
        for folder in folders
    }


def huge_pages() -> str:
    """Whether a program gets huge pages: always, where it asks (madvise), or never."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.read_text().split("[")[1].split("]")[0] if setting.exists() else "unknown"


def commit() -> str:
    """The commit, and whether anything but results differs from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs", ":!README.md")
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def describe() -> dict[str, object]:
    """The machine, the build and the commit."""
    return {
        "commit": commit(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "caches": caches(),
        "huge pages": huge_pages(),
        "capability": torch.ops.nhwc.cpu_capability(),
        "environment": environment.describe(),
    }


def write(out: Path, script: str, results: list, **how: int) -> None:
    """Writes the results of a script of this folder as JSON, with how they were taken and where."""
    measured = {"command": f"python benchmarks/{script}", **how, "machine": describe(), "results": results}
    out.write_text(json.dumps(measured, indent=1) + "\n")
