"""Time on the CPU and on a GPU, by one interface.

`interleaved` times what a device does: on a GPU each job's calls are captured in a CUDA graph, and CUDA events stand
around the graph's replays, so that neither Python nor the launches are in the figures. `Stopwatch.wall` times what a
caller waits for, launches and synchronisation included. The calls of a job go through so many sets of memory that no
cache holds them: `sets_beyond_cache` says how many.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, TypeVar

import torch

from torch_nhwc.running.calls import seconds as seconds_of
from torch_nhwc.tuning.tuner import Race

Call = Callable[[], object]
Sample = TypeVar("Sample")


class Stopwatch:
    """A stopwatch for the CPU."""

    device = "cpu"

    def cache_bytes(self) -> int:
        """Return how large a cache the sets of memory have to exceed."""
        return 64 << 10

    def on_stream(self) -> AbstractContextManager[object]:
        """Return a context in which jobs are made: a backward runs on the stream on which its forward ran."""
        return nullcontext()

    def record(self, calls: Sequence[Call]) -> Call:
        """Return a function that makes all calls, one after the other."""

        def play() -> None:
            for call in calls:
                call()

        return play

    def microseconds(self, play: Call, times: int) -> float:
        """Return how long the device works on one of so many plays."""

        def repeated() -> None:
            for _ in range(times):
                play()

        return self.wall(repeated) / times

    def wall(self, job: Call) -> float:
        """Return the microseconds until the job and the device are done."""
        return seconds_of(job, self.device) * 1e6

    def extra_bytes(self, job: Call) -> int:
        """Return by how much the memory in use on the device grows at most."""
        job()
        return 0

    def launches(self, job: Call) -> dict[str, float] | None:
        """Return how many kernels and copies the device runs, and the kernels' microseconds."""
        job()
        return None


class CudaStopwatch(Stopwatch):
    """A stopwatch for the current GPU."""

    device = "cuda"

    def cache_bytes(self) -> int:
        return torch.cuda.get_device_properties("cuda").L2_cache_size

    @cached_property
    def stream(self) -> torch.cuda.Stream:
        """The stream on which graphs are captured."""
        return torch.cuda.Stream()

    def on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def record(self, calls: Sequence[Call]) -> Call:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with self.on_stream():
            calls[0]()  # nothing is to be loaded or compiled during the capture
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            graph.capture_begin()
            try:
                results = [call() for call in calls]  # kept, so that each result has memory of its own
            finally:
                graph.capture_end()
        return lambda results=results: graph.replay()

    def microseconds(self, play: Call, times: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            play()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / times * 1e3

    def extra_bytes(self, job: Call) -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        job()
        return torch.cuda.max_memory_allocated() - before

    def launches(self, job: Call) -> dict[str, float] | None:
        marker = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            marker.add_(1)
            job()
            torch.cuda.synchronize()
        return count_launches(profile.events())


def count_launches(events: Sequence[Any]) -> dict[str, float] | None:
    """Count a profile's events, less the first kernel: without that one the profiler cannot see the device."""
    events = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [event for event in events if not event.name.startswith(("Memcpy", "Memset"))]
    kernels.sort(key=lambda event: event.time_range.start)
    if not kernels:
        return None
    microseconds = sum(event.time_range.elapsed_us() for event in kernels[1:])
    return {"kernels": len(kernels) - 1, "copies": len(events) - len(kernels), "kernel_us": microseconds}


STOPWATCHES = {"cpu": Stopwatch, "cuda": CudaStopwatch}


def sets_beyond_cache(stopwatch: Stopwatch, bytes_of_a_set: int) -> int:
    """Return how many sets of memory, read and written, are together four times the cache."""
    return max(2, math.ceil(4 * stopwatch.cache_bytes() / bytes_of_a_set))


def summary(values: Sequence[float]) -> dict[str, float]:
    return {"min": min(values), "median": statistics.median(values)}


def in_turns(
    measurements: Mapping[str, Callable[[], Sample]], samples: int, warm_up: int = 1
) -> dict[str, list[Sample]]:
    """Call each measurement once, then each again; return the samples without those of the rounds that warm up."""
    taken: dict[str, list[Sample]] = {name: [] for name in measurements}
    for _ in range(warm_up + samples):
        for name, measure in measurements.items():
            taken[name].append(measure())
    return {name: values[warm_up:] for name, values in taken.items()}


def raced(names: Iterable[str], sample: Callable[[str], float], rounds: range, seconds: float) -> Race:
    """Return a race of as many rounds as the seconds allow, within limits; slower ones stay in it, too."""
    names = list(names)
    race, start = Race(names), time.monotonic()
    while race.rounds < rounds.start or (race.rounds < rounds.stop - 1 and time.monotonic() - start < seconds):
        race.running = [name for name in names if name not in race.failures]
        race.run_round(sample)
    return race


def interleaved(
    stopwatch: Stopwatch, jobs: dict[str, list[Call]], samples: int
) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Return the device's microseconds for one call of each job, and the errors of jobs; the jobs take turns.

    A sample plays all calls of a job as often as takes about a millisecond.
    """
    plays: dict[str, Call] = {}
    errors: dict[str, str] = {}
    for name, calls in jobs.items():
        try:
            plays[name] = stopwatch.record(calls)
        except RuntimeError as error:
            errors[name] = str(error).strip().split("\n")[0]
    for play in plays.values():
        play()
    samplings: dict[str, Callable[[], float]] = {}
    for name, play in plays.items():
        times = min(100, max(1, math.ceil(1000 / max(1, stopwatch.microseconds(play, 1)))))
        samplings[name] = partial(stopwatch.microseconds, play, times)
    taken = in_turns(samplings, samples, warm_up=0)
    return {name: summary([each / len(jobs[name]) for each in values]) for name, values in taken.items()}, errors
