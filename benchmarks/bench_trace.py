"""What a trace adds to each operator.

    python benchmarks/bench_trace.py [--samples N] [--out FILE]

Models of small activations, so that nearly all time is PyTorch's way to an operator, with and without a trace around: a
model that keeps channels-last, and one that loses it everywhere; forward with backward, and inference with and without
inference mode. Without, with, and with a dispatch mode that does nothing take turns, the second step each. One thread;
microseconds of the processor for each operator of the trace, minimum and median.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import machine
import torch
from stopwatch import in_turns, summary
from tables import table
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import torch_nhwc as nhwc

BLOCKS = 20
BAR = 40.0


def block(*losing: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), *losing)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "keeping": lambda: nn.Sequential(*(block() for _ in range(BLOCKS))),
    "losing": lambda: nn.Sequential(*(block(nn.Softmax2d(), nn.InstanceNorm2d(8)) for _ in range(BLOCKS))),
}


class EmptyMode(TorchDispatchMode):
    """A dispatch mode that only runs each operator: what any mode in Python costs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def train(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()


def infer(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def infer_in_mode(model: nn.Module, x: Tensor) -> None:
    with torch.inference_mode():
        model(x)


MODES = {"training": train, "inference": infer, "inference mode": infer_in_mode}


def measure(name: str, mode: str, samples: int) -> dict[str, object]:
    model = MODELS[name]().to(memory_format=torch.channels_last)
    x = torch.randn(1, 4, 4, 8).permute(0, 3, 1, 2)
    with nhwc.trace(model) as trace:
        MODES[mode](model, x)
    operators = sum(trace.operators.values())

    ways = {"alone": nullcontext, "empty mode": EmptyMode, "traced": lambda: nhwc.trace(model)}

    def microseconds(around: Callable[[], AbstractContextManager[object]]) -> float:
        with around():
            MODES[mode](model, x)
            start = time.process_time()
            MODES[mode](model, x)
            return (time.process_time() - start) / operators * 1e6

    taken = in_turns({way: partial(microseconds, around) for way, around in ways.items()}, samples)
    times = {way: summary(values) for way, values in taken.items()}
    added = {
        way: summary([with_it - alone for alone, with_it in zip(taken["alone"], taken[way])])
        for way in ("empty mode", "traced")
    }
    return {
        "model": name,
        "mode": mode,
        "operators": operators,
        "losses": len(trace.losses),
        "times": times,
        "added": added,
        "bar": BAR,
    }


def as_table(measured: dict) -> str:
    """Return a table with a row for each model and mode."""
    rows = []
    for row in measured["results"]:
        added = (f"{each['median']:.0f} ({each['min']:.0f})" for each in row["added"].values())
        rows.append([row["model"], row["mode"], *added, f"{row['bar']:.0f}"])
    return table(["model", "mode", "an empty mode", "a trace", "bar"], rows)


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "trace-cpu.json")
    parser.add_argument("--samples", type=int, default=50)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(name, mode, arguments.samples) for name in MODELS for mode in MODES]
    machine.write(arguments.out, "bench_trace.py", results, samples=arguments.samples)
    for row in results:
        print(row["model"], row["mode"], row["added"])


if __name__ == "__main__":
    main()
