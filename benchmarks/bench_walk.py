"""What converting a model costs besides its bytes.

    python benchmarks/bench_walk.py [--samples N] [--out FILE]

A model of 2,000 layers, with gradients and the state of AdamW: four tensors for each site. The layers of the first
model have 1x1 kernels, so that nothing but strides changes and all time is the walk's; the second one's weights move.
Each sample converts, calls again, and reverts. One thread; microseconds for each site, minimum and median.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
from torch import nn

import torch_nhwc as nhwc

LAYERS = 2000


def microseconds_of(job: Callable[[], Any]) -> tuple[float, Any]:
    """For each site, and what the job returned."""
    start = time.perf_counter()
    result = job()
    return (time.perf_counter() - start) / LAYERS * 1e6, result


def measure(kernel: int, channels: int, samples: int) -> dict[str, object]:
    model = nn.Sequential(*(nn.Conv2d(channels, channels, kernel, bias=False) for _ in range(LAYERS)))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    times: dict[str, list[float]] = {"plan": [], "first": [], "second": [], "revert": []}
    for sample in range(samples + 1):  # the first round warms up
        start = microseconds_of(lambda: nhwc.plan(model))[0]
        first, report = microseconds_of(lambda: nhwc.convert_(model, optimizer=optimizer))
        second = microseconds_of(lambda: nhwc.convert_(model, optimizer=optimizer))[0]
        back = microseconds_of(report.revert)[0]
        round_ = {"plan": start, "first": first, "second": second, "revert": back}
        for name, value in round_.items():
            if sample:
                times[name].append(value)
    return {
        "layers": LAYERS,
        "tensors_per_site": 4,
        "shape": list(model[0].weight.shape),
        "times": {name: {"min": min(values), "median": statistics.median(values)} for name, values in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--out", type=Path, default=machine.ROOT / "benchmarks/results/walk-cpu.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(1, 16, arguments.samples), measure(3, 16, arguments.samples)]
    machine.write(arguments.out, "bench_walk.py", results, samples=arguments.samples)
    print(f"{[result['times'] for result in results]}: {arguments.out}")


if __name__ == "__main__":
    main()
