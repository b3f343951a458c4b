"""Every layer that preserves channels-last: ours and PyTorch's on channels-last, and PyTorch's on contiguous.

    python benchmarks/bench_layers.py [--device cpu|cuda] [--case NAME ...] [--threads N] [--seconds S] [--out FILE]

The three take turns in one process: forward, and forward with backward, which computes the gradients of the input and
of the parameters from a gradient in the output's format. Milliseconds, minimum and median; ratios and bars are of
minima. A layer that fails has the text of its error in place of a time. On a GPU, norms alone: cuda_layers.py.
"""

from collections.abc import Callable, Sequence
from functools import partial

import cuda_layers
import machine
import torch
from layer_cases import (
    CASES,
    FORWARD,
    FUNCTIONS,
    MODES,
    OVER_CONTIGUOUS,
    STOCK_OVER_OURS,
    Case,
    bars,
    inputs,
)
from layout_models import channels_last
from stopwatch import Stopwatch, interleaved

DTYPES = (torch.float32, torch.bfloat16)
FEWEST, MOST = 3, 300


def job(case: Case, dtype: torch.dtype, way: str, mode: str) -> Callable[[], object]:
    """Return the call that is timed."""
    x, parameters, targets = inputs(case, dtype, way)
    call = partial(case.of(FUNCTIONS[way]), x, *parameters, *targets)
    if mode == FORWARD:
        return torch.no_grad()(call)
    out = call()
    gradient = torch.randn(out.shape, dtype=out.dtype)
    if out.dim() > 2 and way != "contiguous":
        gradient = channels_last(gradient)
    return lambda: torch.autograd.grad(call(), [x, *parameters], gradient)


def timed(
    jobs: dict[str, Callable[[], Callable[[], object]]], seconds: float
) -> tuple[dict[str, dict[str, float] | None], dict[str, str]]:
    """Return the milliseconds of jobs that take turns for so long, `None` for those that fail, and the errors."""
    made, errors, round_seconds = {}, {}, 0.0
    for name, make in jobs.items():
        try:
            made[name] = make()
            made[name]()
        except RuntimeError as error:
            made.pop(name, None)
            errors[name] = str(error).strip().split("\n")[0]
            continue
        round_seconds += max(1e-3, Stopwatch().wall(made[name]) * 1e-6)
    samples = min(MOST, max(FEWEST, int(seconds / max(round_seconds, 1e-3))))
    taken, _ = interleaved(Stopwatch(), {name: [call] for name, call in made.items()}, samples)
    milliseconds = {name: {key: value / 1e3 for key, value in times.items()} for name, times in taken.items()}
    return {name: milliseconds.get(name) for name in jobs}, errors


def over(times: dict[str, dict[str, float] | None], longer: str, shorter: str) -> float | None:
    """Return the ratio of two minima, or `None` if one of the jobs failed."""
    a, b = times[longer], times[shorter]
    return None if a is None or b is None else a["min"] / b["min"]


def measure(case: Case, dtype: torch.dtype, mode: str, seconds: float) -> dict[str, object]:
    """Return one row: the three ways, their ratios, and the bars."""
    times, errors = timed({way: partial(job, case, dtype, way, mode) for way in FUNCTIONS}, seconds)
    ratios = {
        OVER_CONTIGUOUS: over(times, "ours", "contiguous"),
        STOCK_OVER_OURS: over(times, "stock_channels_last", "ours"),
        "stock_over_contiguous": over(times, "stock_channels_last", "contiguous"),
    }
    return {
        **case.row(dtype, mode),
        "is_small": case.sample_bytes(dtype) <= machine.cache_bytes("L2"),
        "times": times,
        "errors": errors,
        "ratios": ratios,
        "bars": bars(case, dtype, mode),
    }


def show(row: dict) -> None:
    name = f"{row['layer']}({row['arguments']}) {'x'.join(map(str, row['shape']))} {row['dtype']} {row['mode']}"
    times = [f"{times['min']:.3f}" if times else "fails" for times in row["times"].values()]
    ratios = [f"{value:.2f}" if value else "-" for value in row["ratios"].values()]
    print(f"{name}: {' / '.join(times)} ms; {', '.join(ratios)}", flush=True)


def run(cases: Sequence[Case], seconds: float, dtypes: Sequence[torch.dtype] = DTYPES) -> list[dict]:
    """Measure cases."""
    results = []
    for case in cases:
        for dtype in dtypes:
            for mode in MODES:
                results.append(measure(case, dtype, mode, seconds))
                show(results[-1])
    return results


def main() -> None:
    parser = machine.parser(__doc__, None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--case", nargs="*", default=[], metavar="NAME", help="a part of the names of cases")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.6, help="for each measurement; 0 is for a look")
    arguments = parser.parse_args()
    out = arguments.out or machine.RESULTS / f"layers-{arguments.device}.json"
    cases = CASES if arguments.device == "cpu" else cuda_layers.CASES
    chosen = [case for case in cases if not arguments.case or any(part in case.name for part in arguments.case)]
    if arguments.device == "cuda":
        machine.switch_norms_on()
        return cuda_layers.run(chosen, arguments.seconds, out)
    torch.set_num_threads(arguments.threads)
    how = {"quick": arguments.seconds == 0, "threads": arguments.threads, "seconds": arguments.seconds}
    machine.write(out, "bench_layers.py", run(chosen, arguments.seconds), **how)


if __name__ == "__main__":
    main()
