"""What is reordered inside of operators: oneDNN writes it to the standard output, a GPU's profiler knows kernels."""

import ctypes
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch

from torch_nhwc.tracing.rows import Phase, Reorder
from torch_nhwc.tracing.tallies import Tallies

_LINE = re.compile(rb"(?:onednn|dnnl)_verbose,.*exec,[^,]*,reorder,.*\bsrc:(\S+) dst:([^,]+),.*,([\d.e+-]+)\s*$")
# oneDNN writes whole lines, perhaps behind an unfinished one of somebody else.
_THEIRS = re.compile(rb"(?:onednn|dnnl)_verbose,[^\n]*\n")
# The names of kernels of cuDNN and CUTLASS that change formats.
KERNELS = re.compile(
    r"nchwToNhwc|nhwcToNchw|nchw2nhwc|nhwc2nchw|convertTensor|transpose_readWrite|ncdhw2ndhwc|ndhwc2ncdhw"
)
_RANGE = "torch_nhwc.trace"


class Reorders(Protocol):
    """Runs operators and counts what they reorder."""

    def run(self, call: Callable[[], Any], path: str, phase: Phase) -> Any:
        """The result of an operator."""


@contextmanager
def watch_reorders(tallies: Tallies, is_on_gpu: bool) -> Iterator[Reorders]:
    """Counts reorders while the block runs."""
    if is_on_gpu:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA], acc_events=True
        ) as profile:
            yield _Kernels()
        for row, milliseconds in kernels_in(profile.events()):
            tallies.add(row, milliseconds, 1)
        return
    with ExitStack() as stack:
        output = _Output(stack)
        stack.enter_context(torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON))  # type: ignore[no-untyped-call]
        yield _Verbose(output, tallies)


class _Kernels:
    """Marks what the kernels of an operator belong to."""

    def run(self, call: Callable[[], Any], path: str, phase: Phase) -> Any:
        with torch.profiler.record_function(f"{_RANGE}|{phase}|{path}"):
            return call()


def kernels_in(events: Iterable[Any]) -> Iterator[tuple[Reorder, float]]:
    """The kernels in a profile that change a format, with their milliseconds."""
    for event in events:
        for kernel in event.kernels:
            if KERNELS.search(kernel.name):
                around = event
                while around is not None and not around.name.startswith(_RANGE):
                    around = around.cpu_parent
                _, told, path = around.name.split("|", 2) if around is not None else ("", "", "")
                phase: Phase = "backward" if told == "backward" else "forward"
                yield Reorder(path, phase, kernel.name), kernel.duration / 1000


class _Verbose:
    """Reads what oneDNN wrote behind each operator."""

    def __init__(self, output: "_Output", tallies: Tallies) -> None:
        self.output, self.tallies = output, tallies

    def run(self, call: Callable[[], Any], path: str, phase: Phase) -> Any:
        result = call()
        for line in self.output.read():
            found = _LINE.match(line)
            if found:
                source, target, milliseconds = (each.decode() for each in found.groups())
                what = f"{_layout(source)} -> {_layout(target)}"
                self.tallies.add(Reorder(path, phase, what), float(milliseconds), 1)
        return result


class _Output:
    """The standard output, for a time: oneDNN's lines are taken out of it, and all others go on to where they went."""

    def __init__(self, stack: ExitStack) -> None:
        _flush()
        self.before = os.dup(1)
        stack.callback(os.close, self.before)
        self.file = stack.enter_context(tempfile.TemporaryFile(buffering=0))  # noqa: SIM115  it is closed by the stack
        self.offset = 0
        stack.callback(self.end)
        os.dup2(self.file.fileno(), 1)

    def read(self) -> list[bytes]:
        """The lines of oneDNN that have come since."""
        _flush()
        written = b""
        while chunk := os.pread(self.file.fileno(), 1 << 20, self.offset + len(written)):
            written += chunk
        self.offset += len(written)
        others = memoryview(_THEIRS.sub(b"", written))
        while others:
            others = others[os.write(self.before, others) :]
        return _THEIRS.findall(written)

    def end(self) -> None:
        """Brings the standard output back."""
        self.read()
        os.dup2(self.before, 1)


def _flush() -> None:
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)


def _layout(described: str) -> str:
    """`f32 abcd` of `f32::blocked:abcd::f0`."""
    dtype, _, _, tag, *_ = described.split(":") + [""] * 3
    return f"{dtype} {tag}"
