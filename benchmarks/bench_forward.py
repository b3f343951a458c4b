"""Whole models: conversion beside torch.nn.utils, and the forward pass before and after.

    python benchmarks/bench_models.py [--repeats N] [--threads N] [--out FILE]

Every time is a median of interleaved runs in one process (torch_nhwc/demo.py has the method). Writes JSON with the
machine, and puts the table made of it into the README.
"""

import argparse
import json
import platform
import re
import subprocess
from pathlib import Path

import torch

from torch_nhwc import demo, environment

ROOT = Path(__file__).parent.parent


def processor() -> str:
    """The processor's name as the system knows it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def measure(repeats: int) -> dict:
    torch.manual_seed(0)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT)
    return {
        "command": "python benchmarks/bench_models.py",
        "commit": commit.stdout.strip(),
        "processor": processor(),
        "environment": environment.describe(),
        "repeats": repeats,
        "results": [demo.run(make(), repeats=repeats).as_dict() for make in demo.MODELS.values()],
    }


def figures(measured: dict) -> str:
    """The README's table."""
    machine = f"{measured['processor']}, {measured['environment']['CPU capability']}"
    lines = [
        f"{machine}, {measured['environment']['threads']} threads, torch {measured['environment']['torch']}, float32,",
        f"medians of {measured['repeats']} interleaved runs:",
        "",
        "| model | MB moved / restrided | conversion, ours / `torch.nn.utils` | forward: contiguous / converted / and "
        "channels-last input |",
        "| --- | --- | --- | --- |",
    ]
    for result in measured["results"]:
        moved, restrided = (result[name]["bytes"] / 1e6 for name in ("converted", "restrided"))
        lines.append(
            f"| {result['model']} | {moved:.1f} / {restrided:.1f} "
            f"| {result['convert_ms']:.1f} / {result['stock_convert_ms']:.1f} ms: {result['stock_over_ours']:.1f}x "
            f"| {result['forward_contiguous_ms']:.0f} / {result['forward_converted_ms']:.0f} / "
            f"{result['forward_channels_last_input_ms']:.0f} ms |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/models-cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    measured = measure(arguments.repeats)
    arguments.out.write_text(json.dumps(measured, indent=2) + "\n")
    readme = ROOT / "README.md"
    marks = re.compile(r"(<!-- figures: .* -->\n).*(<!-- end of figures -->)", re.DOTALL)
    readme.write_text(marks.sub(lambda match: f"{match[1]}{figures(measured)}\n{match[2]}", readme.read_text()))
    print(figures(measured))


if __name__ == "__main__":
    main()
