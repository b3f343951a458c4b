"""What a result must say about where it comes from."""

import argparse
import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from torch_nhwc.cli import environment

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"


def processor() -> str:
    """The processor's name as the system knows it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def caches() -> dict[str, str]:
    """The sizes of the caches of one CPU."""
    folders = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    read = [{name: (folder / name).read_text().strip() for name in ("level", "type", "size")} for folder in folders]
    return {f"L{cache['level']} {cache['type']}": cache["size"] for cache in read}


def second_level_bytes() -> int:
    """The size of the second level of cache, by which a sample is small or large."""
    size = next((size for name, size in caches().items() if name.startswith("L2")), "1024K")
    return int(size[:-1]) << {"K": 10, "M": 20}[size[-1]]


def has_amx() -> bool:
    """Whether the processor multiplies matrices of bfloat16 in tiles, which decides what convolutions gain."""
    info = Path("/proc/cpuinfo")
    return info.exists() and "amx_tile" in info.read_text()


def huge_pages() -> str:
    """Whether a program gets huge pages: always, where it asks (madvise), or never."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.read_text().split("[")[1].split("]")[0] if setting.exists() else "unknown"


def commit() -> str:
    """The commit, and whether anything but results differs from it.

    A copy of the working tree without its history is told by the environment variable `TORCH_NHWC_COMMIT`.
    """
    told = os.environ.get("TORCH_NHWC_COMMIT")
    if told:
        return told

    if shutil.which("git") is None:
        return "unknown"

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs", ":!README.md")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if changed else "")


def gpu() -> dict[str, object]:
    """The current GPU, its driver, and the CUDA that torch was built with."""
    properties = torch.cuda.get_device_properties("cuda")
    return {
        "name": properties.name,
        "driver": driver(),
        "CUDA": torch.version.cuda,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "L2 bytes": properties.L2_cache_size,
        "memory bytes": properties.total_memory,
    }


def driver() -> str:
    """The version of the GPU's driver, as its own tool says it."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def describe() -> dict[str, object]:
    """The machine, the build and the commit."""
    return {
        "commit": commit(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "caches": caches(),
        "AMX": has_amx(),
        "huge pages": huge_pages(),
        "capability": torch.ops.nhwc.cpu_capability(),
        "environment": environment.describe(),
    }


def parser(description: str | None, out: Path | None) -> argparse.ArgumentParser:
    """Of a script of this folder, with `--out`, where its results go."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=out)
    return made


def earlier_results(out: Path) -> list[dict]:
    """The results that are in a file, if they were taken on such a machine with such a torch."""
    earlier = json.loads(out.read_text()) if out.exists() else {"machine": {}, "results": []}
    here = describe()
    same = all(earlier["machine"].get(key) == here[key] for key in ("processor", "AMX", "environment"))
    return earlier["results"] if same else []


def write(out: Path, script: str, results: list, **how: object) -> None:
    """Write the results of a script of this folder as JSON, with how they were taken and where."""
    measured = {"command": f"python benchmarks/{script}", **how, "machine": describe(), "results": results}
    out.write_text(compact(measured))
    print(f"{len(results)} results: {out}")


def compact(measured: dict[str, object]) -> str:
    """Return results as JSON text with one case on a line, and numbers of five digits."""
    parts = []
    for name, value in measured.items():
        text = json.dumps(rounded(value))
        if isinstance(value, list) and value:
            lines = ",\n".join(f"  {json.dumps(rounded(case))}" for case in value)
            text = f"[\n{lines}\n ]"
        parts.append(f" {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def rounded(value: object) -> object:
    """Return a value as JSON has it, with five significant digits in each number that is not whole."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, (list, tuple)) else value
