"""What converting a model costs in addition to its bytes.

    python benchmarks/bench_walk.py [--samples N] [--out FILE | --against CHECKOUT]

A model of 2,000 layers, with gradients and the state of AdamW: four tensors for each layer's weight. The layers of the
first model have 1x1 kernels, so that nothing but strides changes and all time is the walk's; the second one's weights
move. Each sample plans, converts, converts again, and reverts. Then small layers by themselves, each converted and
converted again by a call of its own, of ours and of PyTorch's. One thread; microseconds for each layer, minimum and
median.

With `--against`, this checkout and another one, both built in place, take turns; their ratios are printed alone.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import machine
import torch
from stopwatch import in_turns, seconds_in_turns, summary
from torch import nn

import torch_nhwc as nhwc

LAYERS = 2000
SINGLE_LAYERS = 200
ROUNDS = 5


def of_each(taken: dict[str, list[float]], layers: int) -> dict[str, dict[str, float]]:
    """Return the microseconds for each layer."""
    return {name: summary([seconds / layers * 1e6 for seconds in values]) for name, values in taken.items()}


def measure(kernel: int, channels: int, samples: int) -> dict[str, object]:
    model = nn.Sequential(*(nn.Conv2d(channels, channels, kernel, bias=False) for _ in range(LAYERS)))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    convert = partial(nhwc.convert_, model, optimizer=optimizer)
    reports: list[nhwc.Report] = []

    def first() -> Callable[[], object]:
        reports.clear()
        return lambda: reports.append(convert())

    calls = {
        "plan": lambda: partial(nhwc.plan, model),
        "first": first,
        "second": lambda: convert,
        "revert": lambda: reports[0].revert,
    }
    return {
        "layers": LAYERS,
        "tensors_per_site": 4,
        "shape": list(model[0].weight.shape),
        "times": of_each(seconds_in_turns(calls, samples), LAYERS),
    }


def measure_single(samples: int) -> dict[str, object]:
    """Convert layers `Conv2d(3, 8, 3)`, one after the other."""

    def prepare(convert: Callable[..., object], is_first: bool) -> Callable[[], object]:
        layers = [nn.Conv2d(3, 8, 3) for _ in range(SINGLE_LAYERS)]

        def convert_each() -> None:
            for layer in layers:
                convert(layer, torch.channels_last)

        if not is_first:
            convert_each()
        return convert_each

    converters = {"stock": nn.utils, "ours": nhwc}
    calls = {
        f"{which}, {name}": partial(prepare, of.convert_conv2d_weight_memory_format, which == "first")
        for which in ("first", "second")
        for name, of in converters.items()
    }
    return {"shape": [8, 3, 3, 3], "times": of_each(seconds_in_turns(calls, samples), SINGLE_LAYERS)}


def run_in(checkout: Path, samples: int) -> dict[str, float]:
    """Return the least microseconds of each call, measured by the checkout's own script."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "walk.json"
        command = [sys.executable, checkout / "benchmarks/bench_walk.py", "--samples", str(samples), "--out", out]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(checkout)})
        measured = json.loads(out.read_text())
    rows = measured["results"] + ([measured["single"]] if "single" in measured else [])
    return {f"{row['shape']} {call}": times["min"] for row in rows for call, times in row["times"].items()}


def compare(other: Path, samples: int) -> None:
    """Print the least times of all rounds, here and there."""
    checkouts = {"here": machine.ROOT, "there": other.resolve()}
    runs = in_turns({name: partial(run_in, path, samples) for name, path in checkouts.items()}, ROUNDS, warm_up=0)
    for call in runs["here"][0]:
        here, there = (min(run.get(call, math.nan) for run in seen) for seen in runs.values())
        print(f"{call}: {here:.2f} us, there {there:.2f}: {here / there:.2f} times as long")


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "walk-cpu.json")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    arguments = parser.parse_args()
    if arguments.against:
        return compare(arguments.against, arguments.samples)
    torch.set_num_threads(1)
    results = [measure(kernel, 16, arguments.samples) for kernel in (1, 3)]
    single = measure_single(10 * arguments.samples)
    machine.write(arguments.out, "bench_walk.py", results, samples=arguments.samples, single=single)
    print([result["times"] for result in (*results, single)])


if __name__ == "__main__":
    main()
