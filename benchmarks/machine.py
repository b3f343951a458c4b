"""What every script of this folder shares: its arguments, the machine it ran on, and the file of its results."""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from torch_nhwc import ops
from torch_nhwc.cli import describe_environment

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"


def parser(description: str | None, out: Path | None) -> argparse.ArgumentParser:
    """Return a parser with `--out`, the file of the results."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=out)
    return made


def describe() -> dict[str, object]:
    """Return the machine, the build and the commit."""
    found = describe_environment()
    return {
        "commit": commit(),
        **{name: found[name] for name in ("processor", "cores", "capability")},
        "caches": caches(),
        "AMX": has_amx(),
        "bounds": bounds(),
        "huge pages": huge_pages(),
        "environment": found,
    }


def commit() -> str:
    """Return the commit, with "-dirty" if anything but results and documents differs from it.

    In a copy without its history, the environment variable `TORCH_NHWC_COMMIT` names it.
    """
    named = os.environ.get("TORCH_NHWC_COMMIT")
    if named or shutil.which("git") is None:
        return named or "unknown"

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT).stdout.strip()

    changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs", ":!README.md")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("-dirty" if changed else "")


def caches() -> dict[str, str]:
    """Return the sizes of the caches of one CPU."""
    folders = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    read = [{name: (folder / name).read_text().strip() for name in ("level", "type", "size")} for folder in folders]
    return {f"L{cache['level']} {cache['type']}": cache["size"] for cache in read}


def cache_bytes(level: str) -> int:
    """Return the size of a level of cache, such as "L2", which decides whether a sample is small or large."""
    size = next((size for name, size in caches().items() if name.startswith(level)), "1024K")
    return int(size[:-1]) << {"K": 10, "M": 20}[size[-1]]


def has_amx() -> bool:
    """Return whether oneDNN multiplies bfloat16 matrices in tiles: convolutions then gain far more."""
    info = Path("/proc/cpuinfo")
    return "ONEDNN_MAX_CPU_ISA" not in bounds() and info.exists() and "amx_tile" in info.read_text()


def bounds() -> dict[str, str]:
    """Return the variables that hold libraries to fewer instruction sets than the processor has."""
    names = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "TORCH_NHWC_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
    return {name: os.environ[name] for name in names if os.environ.get(name)}


def resident(field: str) -> int:
    """Return a size of this process in bytes: VmRSS is what is resident, VmHWM the most that ever was."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(field))


def forget_peak() -> None:
    """Make VmHWM count from here."""
    Path("/proc/self/clear_refs").write_text("5")


def huge_pages() -> str:
    """Return whether a program gets huge pages: always, never, or on request (madvise)."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.read_text().split("[")[1].split("]")[0] if setting.exists() else "unknown"


def gpu() -> dict[str, object]:
    """Return the current GPU, its driver, and the CUDA that torch was built with."""
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


def switch_norms_on() -> None:
    """Make norms on a GPU run on this library's kernels; end the process where it has none."""
    os.environ["TORCH_NHWC_CUDA_NORMS"] = "1"
    if not ops.runs_cuda_norms():
        sys.exit("this library was built without CUDA: build it on a machine with a CUDA build of torch and nvcc")


def driver() -> str:
    """Return the version of the GPU's driver, as `nvidia-smi` prints it."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def earlier_results(out: Path, gpu: dict[str, object] | None = None) -> list[dict]:
    """Return the results in a file, if they were taken on such a machine, or such a GPU, with such a torch."""
    if not out.exists():
        return []
    earlier, here = json.loads(out.read_text()), describe()
    if gpu:
        same = earlier["gpu"] == gpu and earlier["machine"]["environment"]["torch"] == here["environment"]["torch"]
    else:
        same = all(earlier["machine"][key] == here[key] for key in ("processor", "AMX", "bounds", "environment"))
    return earlier["results"] if same else []


def case_of(row: dict) -> tuple[str, ...]:
    """Return what a result of a model is about: the model, its dtype and mode or its weights' source, and the peer."""
    return tuple(row[key] for key in ("model", "source", "dtype", "mode", "peer") if key in row)


def add(out: Path, script: str, rows: Iterable[dict], order: Callable[[dict], Any], **how: object) -> None:
    """Write results next to the earlier ones of the file, in order; each replaces an earlier one of the same case."""
    by_case = {case_of(row): row for row in (*earlier_results(out, how.get("gpu")), *rows)}
    write(out, script, sorted(by_case.values(), key=order), **how)


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
