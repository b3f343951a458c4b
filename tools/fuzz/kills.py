"""`convert_saved` in processes that are killed at a drawn moment: the output is old, whole or absent."""

import functools
import os
import signal
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from drawing import FORMATS, expect
from torch import Tensor, nn

import torch_nhwc as nhwc

KINDS = ["state dict", "checkpoint", "older format", "archive"]


def draw(random: Random) -> dict[str, Any]:
    return {
        "kind": random.choice(KINDS),
        # In units of how long the conversion takes undisturbed.
        "moment": random.uniform(0, 0.9),
        "output": random.choice(("new", "old", "input")),
    }


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 256, 3), nn.ReLU(), nn.Conv2d(256, 512, 3), nn.Conv2d(512, 128, 1))


@functools.cache
def _source(kind: str) -> tuple[bytes, float]:
    """Return a file's bytes, and how long its conversion takes here in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path, network = Path(folder, "in.pt"), model()
        if kind == "archive":
            torch.jit.script(network).save(path)
        elif kind == "checkpoint":
            torch.save({"model": network.state_dict(), "epoch": 3}, path)
        else:
            torch.save(network.state_dict(), path, _use_new_zipfile_serialization=kind == "state dict")
        start = time.perf_counter()
        os.waitpid(_convert(path, Path(folder, "out.pt")), 0)
        seconds = time.perf_counter() - start
        expect(_is_whole(kind, Path(folder, "out.pt"), True), "an undisturbed conversion is not whole")
        return path.read_bytes(), seconds


def _convert(path: Path, output: Path) -> int:
    """Convert a file in a forked process, and return its number; a new interpreter would take seconds to begin."""
    child = os.fork()
    if child == 0:
        try:
            nhwc.convert_saved(path, output)
        finally:
            os._exit(0)
    return child


def _tensors(kind: str, path: Path) -> dict[str, Tensor]:
    if kind == "archive":
        loaded: Any = torch.jit.load(path)
        return dict(loaded.state_dict())
    loaded = torch.load(path)
    return loaded["model"] if kind == "checkpoint" else loaded


def _is_whole(kind: str, path: Path, is_converted: bool) -> bool:
    tensors = _tensors(kind, path)
    for name, expected in model().state_dict().items():
        each = tensors[name]
        if is_converted and each.dim() in FORMATS and not each.is_contiguous(memory_format=FORMATS[each.dim()]):
            return False
        if not torch.equal(each, expected):
            return False
    return True


def check(case: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(1)  # a forked process has none of the others
    content, seconds = _source(case["kind"])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "in.pt")
        path.write_bytes(content)
        output = path if case["output"] == "input" else Path(folder, "out.pt")
        old = content if case["output"] == "input" else b"what was there before"
        if case["output"] == "old":
            output.write_bytes(old)
        child = _convert(path, output)
        time.sleep(case["moment"] * seconds)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        expect(output == path or path.read_bytes() == content, "the input has changed")
        left = {each.name for each in path.parent.iterdir()} - {path.name, output.name}
        expect(all(name.startswith(f".{output.name}.") and name.endswith(".part") for name in left), f"left {left}")
        if not output.exists():
            expect(case["output"] == "new", "the old output is gone")
            result = "absent"
        elif output.read_bytes() == old:
            result = "old"
        else:
            expect(_is_whole(case["kind"], output, True), "the output is neither old nor whole")
            result = "whole"
        # What a kill has left is in nobody's way.
        nhwc.convert_saved(path, output)
        expect(_is_whole(case["kind"], output, True), "the next conversion is not whole")
    was_killed = os.WIFSIGNALED(status)
    return {f"output {result}": 1, "killed midway": int(was_killed), "temporary files left": len(left)}
