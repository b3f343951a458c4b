"""What it costs to convert weights in each forward: `bench_models.py --each-forward`.

Steps of training on one thread, of a model whose weights are converted once and of its copy whose weights are converted
in each forward, in turns, at several batch sizes; the figures are medians over the rounds. Inputs are channels-last.
"""

import copy
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path

import machine
import torch
from layout_models import first_tensor
from models import MODELS, weights_of
from stopwatch import seconds_in_turns
from tables import table
from torch import nn

import torch_nhwc as nhwc

BATCHES = (1, 8, 32)
INPUTS = {
    "ResNet-50 (transformers)": (3, 112, 112),
    "MobileNetV2 (transformers)": (3, 112, 112),
    "3D UNet (monai)": (1, 32, 32, 32),
}


def step_of(model: nn.Module, x: torch.Tensor) -> Callable[[], object]:
    """Return a step: forward, backward and SGD, in float32."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        first_tensor(model(x)).square().mean().backward()
        optimizer.step()

    return step


def measure(name: str, batch: int, rounds: int) -> dict[str, object]:
    """Return the milliseconds of a step, converted once and in each forward."""
    torch.manual_seed(0)
    converted = MODELS[name]().train()
    each_forward = copy.deepcopy(converted)
    nhwc.convert_(converted, input_format="channels_last")
    nhwc.convert_(each_forward, each_forward=True, input_format="channels_last")
    x = torch.randn(batch, *INPUTS[name])
    steps = {"converted": step_of(converted, x), "each_forward": step_of(each_forward, x)}
    times = seconds_in_turns({job: partial(lambda step: step, step) for job, step in steps.items()}, rounds)
    medians = {job: statistics.median(taken) * 1e3 for job, taken in times.items()}
    size = sum(weight.nbytes for weight in weights_of(converted))
    return {"model": name, "batch": batch, "bytes": size, "ms": medians}


def run(models: list[str], rounds: int, out: Path) -> None:
    """Measure models, and write the results."""
    torch.set_num_threads(1)
    results = []
    for name in [name for name in models if name in INPUTS]:
        for batch in BATCHES:
            results.append(measure(name, batch, rounds))
            print(results[-1], flush=True)
    machine.write(out, "bench_models.py --each-forward", results, rounds=rounds)


def percent(result: dict) -> float:
    """Return by how many percent a step takes longer."""
    return 100 * (result["ms"]["each_forward"] / result["ms"]["converted"] - 1)


def as_table(measured: dict) -> str:
    """Return a table with a row for each model and a column for each batch size."""
    rows = []
    for name in dict.fromkeys(result["model"] for result in measured["results"]):
        of_model = [result for result in measured["results"] if result["model"] == name]
        cells = [f"{percent(result):+.1f} % of {result['ms']['converted']:.0f} ms" for result in of_model]
        rows.append([name, f"{of_model[0]['bytes'] / 1e6:.0f}", *cells])
    return table(["model", "MB of weights", *(f"batch {batch}" for batch in BATCHES)], rows)
