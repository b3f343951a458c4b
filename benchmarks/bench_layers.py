"""Every layer that preserves channels-last: ours and PyTorch's on channels-last, and PyTorch's on contiguous.

    python benchmarks/bench_layers.py [--device cpu|cuda] [--operators] [--case NAME ...] [--threads N] [--seconds S]
        [--out FILE]

The three take turns in one process: forward, and forward with backward, which computes the gradients of the input and
of the parameters from a gradient in the output's format. Milliseconds, minimum and median; ratios and bars are of
minima. A layer that fails has the text of its error in place of a time.

On a GPU, norms alone, forward and backward by itself, next to a copy of the activation: device times in microseconds.
The calls of a job go through so many sets of memory that no cache holds them, in a CUDA graph (stopwatch.py). PyTorch's
norm on channels-last includes what restores the format of its output, where it loses it. The bandwidth of a norm is
that of the bytes that must move: two reads and a write forward, four reads and a write backward. With `--operators`,
other operators that follow convolutions, in bfloat16, next to a copy of their input: PyTorch's, and ours of padding and
interpolation.
"""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import machine
import torch
from layer_cases import (
    CASES,
    CASES_ON_GPU,
    FORWARD,
    FUNCTIONS,
    MODES,
    OPERATORS_ON_GPU,
    OVER_CONTIGUOUS,
    STOCK_OVER_OURS,
    Case,
    bars,
    inputs,
)
from layout_models import channels_last, difference
from stopwatch import STOPWATCHES, Call, Stopwatch, interleaved, sets_beyond_cache
from torch import Tensor

from torch_nhwc.layout import CHANNELS_LAST

BACKWARD = "backward"
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}
MOVES = {FORWARD: 3, BACKWARD: 5}  # of the activation's bytes
# The fewest and the most samples on each device.
SAMPLES = {"cpu": (3, 300), "cuda": (3, 100)}


def job(case: Case, dtype: torch.dtype, way: str, mode: str, device: str = "cpu", is_restored: bool = False) -> Call:
    """Return the call that is timed, with memory of its own; its output gets the format of its input, if asked."""
    x, parameters, targets = inputs(case, dtype, way, device)
    function = case.of(FUNCTIONS[way])

    def in_format(tensor: Tensor) -> Tensor:
        if way == "contiguous" or tensor.dim() == 0:
            return tensor.contiguous()
        return tensor.contiguous(memory_format=CHANNELS_LAST[tensor.dim()])

    def call() -> Tensor:
        out = function(x, *parameters, *targets)
        return in_format(out) if is_restored else out

    if mode == FORWARD:
        return torch.no_grad()(call)
    out = call()
    gradient = in_format(torch.randn(out.shape, dtype=out.dtype, device=device))
    if mode == BACKWARD:
        return lambda: torch.autograd.grad(out, [x, *parameters], gradient, retain_graph=True)
    return lambda: torch.autograd.grad(call(), [x, *parameters], gradient)


def copy(case: Case, dtype: torch.dtype, device: str) -> Call:
    """Return a copy of the activation."""
    x = channels_last(torch.zeros(case.shape, dtype=dtype, device=device))
    out = torch.empty_like(x)
    return lambda: out.copy_(x)


def differences(jobs: dict[str, Call]) -> dict[str, float]:
    """Return the largest difference of the output, or of the input's gradient, from the contiguous one."""

    def result(call: Call) -> Tensor:
        found: Any = call()
        return (found if isinstance(found, Tensor) else found[0]).float()

    expected = result(jobs["contiguous"])
    return {way: difference(result(call), expected) for way, call in jobs.items() if way != "contiguous"}


def samples(stopwatch: Stopwatch, jobs: dict[str, list[Call]], seconds: float) -> int:
    """Return how many rounds the seconds allow, within limits."""
    took = sum(stopwatch.wall(calls[0]) * len(calls) for calls in jobs.values()) * 1e-6
    fewest, most = SAMPLES[stopwatch.device]
    # A sample of one job takes at least a millisecond.
    return min(most, max(fewest, int(seconds / max(1e-3 * len(jobs), took, 1e-3))))


def over(times: dict[str, dict[str, float] | None], longer: str, shorter: str) -> float | None:
    """Return the ratio of two minima, or `None` if one of the jobs failed."""
    a, b = times[longer], times[shorter]
    return None if a is None or b is None else a["min"] / b["min"]


def measure(case: Case, dtype: torch.dtype, mode: str, seconds: float) -> dict[str, object]:
    """Return one row: the three ways, their ratios, and the bars."""
    jobs, failed = {}, {}
    for way in FUNCTIONS:
        try:
            call = job(case, dtype, way, mode)
            call()
            jobs[way] = [call]
        except RuntimeError as error:
            failed[way] = str(error).strip().split("\n")[0]
    stopwatch = Stopwatch()
    taken, _ = interleaved(stopwatch, jobs, samples(stopwatch, jobs, seconds))
    milliseconds = {way: {name: each / 1e3 for name, each in found.items()} for way, found in taken.items()}
    times = {way: milliseconds.get(way) for way in FUNCTIONS}
    ratios = {
        OVER_CONTIGUOUS: over(times, "ours", "contiguous"),
        STOCK_OVER_OURS: over(times, "stock_channels_last", "ours"),
        "stock_over_contiguous": over(times, "stock_channels_last", "contiguous"),
    }
    return {
        **case.row(dtype, mode),
        "is_small": case.sample_bytes(dtype) <= machine.cache_bytes("L2"),
        "times": times,
        "errors": failed,
        "ratios": ratios,
        "bars": bars(case, dtype, mode),
    }


def measure_on_gpu(case: Case, dtype: torch.dtype, mode: str, seconds: float) -> dict[str, object]:
    stopwatch = STOPWATCHES["cuda"]()
    nbytes = math.prod(case.shape) * dtype.itemsize
    makers = {way: partial(job, case, dtype, way, mode, stopwatch.device, True) for way in case.ways}
    makers["copy"] = partial(copy, case, dtype, stopwatch.device)
    number = sets_beyond_cache(stopwatch, 2 * nbytes)
    jobs: dict[str, list[Call]] = {}
    refused: dict[str, str] = {}
    with stopwatch.on_stream():
        for name, make in makers.items():
            try:
                jobs[name] = [make() for _ in range(number)]
            except RuntimeError as error:
                refused[name] = str(error).strip().split("\n")[0]
        off = differences({way: jobs[way][0] for way in case.ways if way in jobs})
        rounds = samples(stopwatch, jobs, seconds)
    times, errors = interleaved(stopwatch, jobs, rounds)
    figures = {"bytes": nbytes, "moves": MOVES[mode], "sets": number}
    return {**case.row(dtype, mode), **figures, "times": times, "differences": off, "errors": refused | errors}


def show(row: dict) -> None:
    name = f"{row['layer']}({row['arguments']}) {'x'.join(map(str, row['shape']))} {row['dtype']} {row['mode']}"
    times = [f"{way} {times['min']:.4g}" if times else f"{way} fails" for way, times in row["times"].items()]
    print(f"{name}: {', '.join(times)}", flush=True)


def run(cases: Sequence[Case], seconds: float, out: Path, device: str = "cpu", threads: int = 1) -> None:
    """Measure cases, and write the results."""
    script, modes, measured = "bench_layers.py", MODES, measure
    how: dict[str, object] = {"quick": seconds == 0, "threads": threads}
    if device == "cuda":
        script, modes, measured = f"{script} --device cuda", tuple(MOVES), measure_on_gpu
        how = {"gpu": machine.gpu()}
    results = []
    for case in cases:
        for dtype in case.dtypes or DTYPES[device]:
            for mode in modes:
                results.append(measured(case, dtype, mode, seconds))
                show(results[-1])
    machine.write(out, script, results, **how, seconds=seconds)


def main() -> None:
    parser = machine.parser(__doc__, None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--operators", action="store_true", help="those after convolutions, on a GPU")
    parser.add_argument("--case", nargs="*", default=[], metavar="NAME", help="a part of the names of cases")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.6, help="for each measurement; 0 is for a look")
    arguments = parser.parse_args()
    cases = CASES
    if arguments.device == "cuda":
        machine.switch_norms_on()
        cases = OPERATORS_ON_GPU if arguments.operators else CASES_ON_GPU
    torch.set_num_threads(arguments.threads)
    chosen = [case for case in cases if not arguments.case or any(part in case.name for part in arguments.case)]
    kind = "operators" if arguments.operators else "layers"
    out = arguments.out or machine.RESULTS / f"{kind}-{arguments.device}.json"
    run(chosen, arguments.seconds, out, arguments.device, arguments.threads)


if __name__ == "__main__":
    main()
