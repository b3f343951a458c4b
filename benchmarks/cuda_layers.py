"""Norms on a GPU: this library's, PyTorch's on channels-last and on contiguous, and a copy of the activation.

`bench_layers.py --device cuda`. Device time, in microseconds for one call, of the forward and of the backward alone:
minimum and median of samples in which the jobs take turns. The calls of a job go through so many sets of memory that no
cache holds them, in a CUDA graph (stopwatch.py). PyTorch's norm on channels-last includes what restores the format of
its output, where it loses it. The bandwidth of a norm is that of the bytes that must move: two reads and a write
forward, four reads and a write backward.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import machine
import torch
from layer_cases import FORWARD, FUNCTIONS, Case, group_norm, inputs, instance_norm, name_of
from layout_models import channels_last, difference
from stopwatch import STOPWATCHES, Call, Stopwatch, interleaved, sets_beyond_cache
from torch import Tensor

from torch_nhwc.layout import CHANNELS_LAST

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOVES = {FORWARD: 3, "backward": 5}  # of the activation's bytes
FEWEST, MOST = 3, 100
# Of at least 64 MB in each dtype, and small ones: the deep levels of a U-Net, and blocks of a diffusion model.
LARGE = ((32, 256, 64, 64), (4, 32, 512, 512), (2, 64, 64, 64, 64), (1, 32, 128, 128, 64))
SMALL = ((8, 320, 32, 32), (2, 1280, 16, 16), (2, 320, 8, 8, 8), (2, 128, 16, 16, 16), (1, 32, 32, 32, 32))


def cases() -> Iterator[Case]:
    """Yield group norm with one group, with 32 and with one channel in each, and instance norm."""
    for shape in (*LARGE, *SMALL):
        affine = ((shape[1],),) * 2
        for groups in sorted({1, 32, shape[1]}):
            yield Case("group_norm", str(groups), shape, partial(group_norm, groups), affine)
        yield Case("instance_norm", "affine", shape, instance_norm, affine)


CASES = list(cases())


def job(case: Case, dtype: torch.dtype, way: str, mode: str, device: str) -> Call:
    """Return the call that is timed, with memory of its own."""
    x, parameters, _ = inputs(case, dtype, way, device)
    memory_format = torch.contiguous_format if way == "contiguous" else CHANNELS_LAST[x.dim()]
    norm = case.of(FUNCTIONS[way])

    def call() -> Tensor:
        return norm(x, *parameters).contiguous(memory_format=memory_format)

    if mode == FORWARD:
        return torch.no_grad()(call)
    out = call()
    gradient = torch.randn(case.shape, dtype=dtype, device=device).contiguous(memory_format=memory_format)
    return lambda: torch.autograd.grad(out, [x, *parameters], gradient, retain_graph=True)


def copy(case: Case, dtype: torch.dtype, device: str) -> Call:
    """Return a copy of the activation."""
    x = channels_last(torch.zeros(case.shape, dtype=dtype, device=device))
    out = torch.empty_like(x)
    return lambda: out.copy_(x)


def differences(jobs: dict[str, Call]) -> dict[str, float]:
    """Return the largest difference of the output, or of the input's gradient, from the contiguous one."""

    def result(call: Call) -> Tensor:
        found = call()
        return (found if isinstance(found, Tensor) else found[0]).float()

    expected = result(jobs["contiguous"])
    return {way: difference(result(call), expected) for way, call in jobs.items() if way != "contiguous"}


def measure(stopwatch: Stopwatch, case: Case, dtype: torch.dtype, mode: str, seconds: float) -> dict[str, object]:
    """Return one row."""
    nbytes = math.prod(case.shape) * dtype.itemsize
    device = stopwatch.device
    makers: dict[str, Callable[[], Call]] = {way: partial(job, case, dtype, way, mode, device) for way in FUNCTIONS}
    makers["copy"] = partial(copy, case, dtype, device)
    number = sets_beyond_cache(stopwatch, 2 * nbytes)
    with stopwatch.on_stream():
        jobs = {name: [make() for _ in range(number)] for name, make in makers.items()}
        off = differences({way: jobs[way][0] for way in FUNCTIONS})
        took = sum(stopwatch.wall(calls[0]) for calls in jobs.values()) * 1e-6 * number
    times, errors = interleaved(stopwatch, jobs, min(MOST, max(FEWEST, int(seconds / took))))
    return {
        **case.row(dtype, mode),
        "bytes": nbytes,
        "moves": MOVES[mode],
        "sets": number,
        "times": times,
        "differences": off,
        "errors": errors,
    }


def run(chosen: Sequence[Case], seconds: float, out: Path) -> None:
    """Measure cases on the current GPU, each for so many seconds."""
    stopwatch = STOPWATCHES["cuda"]()
    results = []
    for case in chosen:
        for dtype in DTYPES:
            for mode in MOVES:
                results.append(measure(stopwatch, case, dtype, mode, seconds))
                times = {way: round(each["min"], 1) for way, each in results[-1]["times"].items()}
                print(case.name, name_of(dtype), mode, times, results[-1]["differences"], flush=True)
    machine.write(out, "bench_layers.py --device cuda", results, seconds=seconds, gpu=machine.gpu())
