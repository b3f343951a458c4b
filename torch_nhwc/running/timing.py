"""Time jobs that take turns, so that whatever disturbs the machine disturbs all of them."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch

Job = Callable[[], object]
Sample = TypeVar("Sample")


def in_turns(
    measurements: Mapping[str, Callable[[], Sample]], samples: int, warm_up: int = 1
) -> dict[str, list[Sample]]:
    """Call each measurement once, then each again; return the samples without those of the rounds that warm up."""
    taken: dict[str, list[Sample]] = {name: [] for name in measurements}
    for _ in range(warm_up + samples):
        for name, measure in measurements.items():
            taken[name].append(measure())
    return {name: values[warm_up:] for name, values in taken.items()}


def seconds(job: Job, device: str = "cpu") -> float:
    """Return how long a job takes, including the device's work, but not the time to free the result."""
    _synchronize(device)
    start = time.perf_counter()
    result = job()
    _synchronize(device)
    taken = time.perf_counter() - start
    del result
    return taken


def seconds_in_turns(
    preparations: Mapping[str, Callable[[], Job]], samples: int, device: str = "cpu"
) -> dict[str, list[float]]:
    """Return the `seconds` of jobs that take turns; each preparation makes a job for one sample, untimed."""

    def measure(prepare: Callable[[], Job]) -> float:
        return seconds(prepare(), device)

    return in_turns({name: partial(measure, prepare) for name, prepare in preparations.items()}, samples)


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
