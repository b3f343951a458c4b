"""Measuring jobs that take turns, so that whatever disturbs the machine disturbs them all."""

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

import torch

Job = Callable[[], object]
Sample = TypeVar("Sample")


def in_turns(
    measurements: Mapping[str, Callable[[], Sample]], samples: int, warm_up: int = 1
) -> dict[str, list[Sample]]:
    """Calls each measurement for one sample, then each for the next; the rounds that warm up do not count."""
    taken: dict[str, list[Sample]] = {name: [] for name in measurements}
    for _ in range(warm_up + samples):
        for name, measure in measurements.items():
            taken[name].append(measure())
    return {name: values[warm_up:] for name, values in taken.items()}


def seconds(job: Job, device: str = "cpu") -> float:
    """How long a caller waits until a job is done, and the device with it; freeing the job's result is not in it."""
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
    """The `seconds` of jobs that take turns; each preparation makes a job for one sample, outside of the time."""

    def measure(prepare: Callable[[], Job]) -> float:
        return seconds(prepare(), device)

    return in_turns({name: partial(measure, prepare) for name, prepare in preparations.items()}, samples)


def differ(some: Sequence[float], others: Sequence[float]) -> bool:
    """Whether two jobs take different times: the medians lie farther apart than the middle halves are wide together.

    With five runs of each, equal jobs are rarely called different (4 % in a simulation of noise); with one, never.
    """
    if min(len(some), len(others)) < 2:
        return False
    width = 0.0
    for taken in (some, others):
        first, _, last = statistics.quantiles(taken, n=4, method="inclusive")
        width += last - first
    return abs(statistics.median(some) - statistics.median(others)) > width


def give_freed_memory_back() -> None:
    """Returns freed memory to the system: otherwise a cold run may be given the warm pages of an earlier one."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of the GNU C library
    if trim is not None:
        trim(0)


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
