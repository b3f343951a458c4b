"""Whole models on a GPU, all in one process.

`bench_models.py --device cuda`. For each model:

- `device`: device time of what converts its weights, and of copies of as many bytes, in CUDA graphs of calls that go
  through sets of weights beyond the second-level cache, microseconds for one call;
- `wall`: the microseconds that a caller waits, synchronisation included, from contiguous weights with memory of their
  own and with the allocator warm; and the memory in use beyond the model at its highest;
- `launches`: how many kernels and copies the device runs.

A model whose library is missing is made of layers with the same weights (shapes.py).
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import machine
import shapes
import torch
from jobs import JOBS
from models import MODELS, made, moved_of, weights_of
from stopwatch import STOPWATCHES, Call, Stopwatch, in_turns, interleaved, sets_beyond_cache, summary
from torch import Tensor, nn

import torch_nhwc as nhwc
from torch_nhwc.layout import CHANNELS_LAST

DTYPES = [torch.float32, torch.bfloat16]


def model_of(name: str, dtype: torch.dtype, device: str) -> tuple[nn.Module, str]:
    """Return a model, and where it comes from."""
    try:
        return made(lambda: MODELS[name]().to(dtype), device=device), "its library"
    except ImportError:
        return made(lambda: shapes.convolutions(shapes.load()[name]).to(dtype), device=device), shapes.FILE.name


def nbytes_of(weights: list[Tensor]) -> int:
    return sum(weight.nbytes for weight in weights)


class WeightSet(NamedTuple):
    """A copy of the weights that are converted, and as many bytes to copy."""

    weights: list[Tensor]
    copied: Tensor
    copy: Tensor


def weight_set(weights: list[Tensor]) -> WeightSet:
    copied, copy = (torch.zeros(nbytes_of(weights), dtype=torch.uint8, device=weights[0].device) for _ in range(2))
    return WeightSet([weight.detach().clone() for weight in weights], copied, copy)


def contiguous_each(weights: list[Tensor]) -> list[Tensor]:
    return [weight.contiguous(memory_format=CHANNELS_LAST[weight.dim()]) for weight in weights]


DEVICE_JOBS: dict[str, Callable[[WeightSet], object]] = {
    "ours": lambda on: nhwc.convert_weights(on.weights),
    "ours one by one": lambda on: [nhwc.convert_weight(weight) for weight in on.weights],
    "copy": lambda on: on.copy.copy_(on.copied),
    "eager": lambda on: contiguous_each(on.weights),
}


def device_times(stopwatch: Stopwatch, weights: list[Tensor], samples: int) -> dict[str, object]:
    """Time `DEVICE_JOBS` on these weights."""
    sets = [weight_set(weights) for _ in range(sets_beyond_cache(stopwatch, 2 * nbytes_of(weights)))]
    jobs = {name: [partial(job, on) for on in sets] for name, job in DEVICE_JOBS.items()}
    times, errors = interleaved(stopwatch, jobs, samples)
    return {"bytes": nbytes_of(weights), "sets": len(sets), "times": times, "errors": errors}


def wall_jobs(model: nn.Module, weights: list[Tensor]) -> dict[str, Call]:
    """Return the jobs of the CPU's benchmark, walk included, and the operators alone."""
    return {name: partial(job, model) for name, job in JOBS.items()} | {
        "ours, listed": lambda: nhwc.convert_weights_(weights),
        "ours, listed, fresh": lambda: nhwc.convert_weights_(weights, storage="fresh"),
        "ours one by one": lambda: [nhwc.convert_weight_(weight) for weight in weights],
    }


def make_contiguous(weights: list[Tensor]) -> None:
    """Make weights contiguous, with memory of their own, as in a new model."""
    for weight in weights:
        weight.data = weight.data.clone(memory_format=torch.contiguous_format)


def wall_times(stopwatch: Stopwatch, model: nn.Module, weights: list[Tensor], rounds: int) -> dict[str, object]:
    jobs = wall_jobs(model, weights)
    if len({weight.dim() for weight in weights}) > 1:
        del jobs["module.to"]  # which has one format for 2D and 3D layers

    def measure(name: str, job: Call) -> dict[str, float]:
        make_contiguous(weights)
        taken: list[float] = []
        extra_bytes = stopwatch.extra_bytes(lambda: taken.append(stopwatch.wall(job)))
        assert all(weight.stride(1) == 1 for weight in moved_of(weights)), name
        return {"us": taken[0], "extra_bytes": extra_bytes}

    runs = in_turns({name: partial(measure, name, job) for name, job in jobs.items()}, rounds)
    return {
        name: {**summary([run["us"] for run in seen]), "extra_bytes": max(run["extra_bytes"] for run in seen)}
        for name, seen in runs.items()
    }


def launches(stopwatch: Stopwatch, model: nn.Module, weights: list[Tensor]) -> dict[str, object]:
    counted = {}
    for name, job in {**wall_jobs(model, weights), "convert_weights": lambda: nhwc.convert_weights(weights)}.items():
        if name in ("stock", "ours", "ours fresh", "convert_weights"):
            make_contiguous(weights)
            counted[name] = stopwatch.launches(job)
    return counted


@torch.no_grad()
def measure(stopwatch: Stopwatch, name: str, dtype: torch.dtype, rounds: int) -> dict[str, object]:
    """Measure one model."""
    model, source = model_of(name, dtype, stopwatch.device)
    weights = weights_of(model)
    moved = moved_of(weights)
    return {
        "model": name,
        "source": source,
        "dtype": str(dtype).removeprefix("torch."),
        "commit": machine.commit(),
        "weights": len(weights),
        "device": {
            which: device_times(stopwatch, chosen, rounds)
            for which, chosen in {"all": weights, "moved": moved}.items()
            if chosen
        },
        "wall": wall_times(stopwatch, model, weights, rounds),
        "launches": launches(stopwatch, model, weights),
    }


def run(models: list[str], rounds: int, out: Path) -> None:
    """Measure models on the current GPU, and write the file after each of them."""
    stopwatch, order = STOPWATCHES["cuda"](), list(MODELS)
    for name in models:
        rows = [measure(stopwatch, name, dtype, rounds) for dtype in DTYPES]
        for row in rows:
            print({key: row[key] for key in ("model", "dtype", "source", "launches")}, file=sys.stderr)
        machine.add(
            *(out, "bench_models.py --device cuda", rows),
            order=lambda row: (order.index(row["model"]), row["dtype"] != "float32"),
            **{"rounds": rounds, "gpu": machine.gpu()},
        )
