"""One weight at a time on a GPU, compared with copies in the same layout and with what PyTorch does.

`bench_weights.py --device cuda`. Device time, in microseconds for one call: minimum and median of samples in which the
jobs take turns. The calls of a job go through sets of weights that are together four times the second-level cache, read
and written, in a CUDA graph (stopwatch.py). The copies move as many bytes as the conversion reads and writes, also
where it casts.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import machine
import torch
from jobs import compiled_clone
from points import Point
from stopwatch import STOPWATCHES, Stopwatch, interleaved, sets_beyond_cache
from torch import Tensor

KERNELS = [(2, 2), (2, 2, 2), (3, 3), (4, 4), (5, 5), (3, 3, 3), (7, 7), (5, 5, 5)]
OF_THE_BARS = [(3, 3), (5, 5), (3, 3, 3), (7, 7)]
SMALL = [(64, 64, 3, 3), (256, 128, 2, 2), (256, 256, 3, 3), (64, 64, 3, 3, 3), (64, 3, 7, 7), (512, 512, 3, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float64]
CASTS = [(torch.float32, torch.bfloat16), (torch.float32, torch.float16)]
LARGE = 16 << 20


class Buffers(NamedTuple):
    """One set of memory."""

    weight: Tensor
    out: Tensor
    copied: Tensor
    copy: Tensor


def shape_of(kernel: tuple[int, ...], nbytes: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the shape of a weight of 256 channels and at least so many bytes."""
    channels = 256
    return (math.ceil(nbytes / (channels * math.prod(kernel) * dtype.itemsize)), channels, *kernel)


def points(with_compile: bool) -> Iterator[Point]:
    for back in (False, True):
        for dtype in DTYPES:
            for kernel in KERNELS:
                is_compiled = with_compile and not back and kernel in OF_THE_BARS and dtype in DTYPES[:2]
                yield Point(shape_of(kernel, LARGE, dtype), dtype, back, with_compile=is_compiled)
        for kernel in OF_THE_BARS:
            for dtype in DTYPES[:3]:
                yield Point(shape_of(kernel, 4 * LARGE, dtype), dtype, back)
            for wide, narrow in CASTS:
                shape = shape_of(kernel, LARGE, narrow)
                yield Point(shape, wide, back, narrow)
                yield Point(shape, narrow, back, wide)
    for shape in SMALL:
        for dtype in DTYPES[:2]:
            yield Point(shape, dtype)


def buffers_of(point: Point, device: str) -> Buffers:
    source_format, memory_format = point.formats
    values = torch.randint(0, 100, point.shape, dtype=torch.uint8, device=device)
    weight = torch.empty(point.shape, dtype=point.dtype, device=device, memory_format=source_format).copy_(values)
    out = torch.empty(point.shape, dtype=point.to or point.dtype, device=device, memory_format=memory_format)
    copied, copy = (torch.zeros((weight.nbytes + out.nbytes) // 2, dtype=torch.uint8, device=device) for _ in range(2))
    return Buffers(weight, out, copied, copy)


def jobs_of(point: Point) -> dict[str, Callable[[Buffers], object]]:
    memory_format, to = point.formats[1], point.to
    copy_weight_, convert_weight = torch.ops.nhwc.copy_weight_, torch.ops.nhwc.convert_weight
    jobs: dict[str, Callable[[Buffers], object]] = {
        "ours": lambda on: copy_weight_(on.out, on.weight),
        "ours_fresh": lambda on: convert_weight(on.weight, memory_format, dtype=to),
        "plain_copy": lambda on: on.copy.copy_(on.copied),
        "eager_copy": lambda on: on.out.copy_(on.weight),
    }
    if to is None:
        jobs["eager_contiguous"] = lambda on: on.weight.contiguous(memory_format=memory_format)
    else:
        jobs["eager_two_steps"] = lambda on: on.out.copy_(on.weight.to(to))
    if point.with_compile:
        clone = compiled_clone(memory_format)
        jobs["compiled_clone"] = lambda on: clone(on.weight)
    return jobs


def measure(stopwatch: Stopwatch, point: Point, samples: int) -> dict[str, object]:
    first = buffers_of(point, stopwatch.device)
    torch.ops.nhwc.copy_weight_(first.out, first.weight)
    assert torch.equal(first.out, first.weight.to(first.out.dtype))
    number = sets_beyond_cache(stopwatch, first.weight.nbytes + first.out.nbytes)
    sets = [first, *(buffers_of(point, stopwatch.device) for _ in range(number - 1))]
    jobs = {name: [partial(job, on) for on in sets] for name, job in jobs_of(point).items()}
    times, errors = interleaved(stopwatch, jobs, samples)
    return {
        **point.described(),
        "bytes": first.weight.nbytes,
        "copied_bytes": first.copied.nbytes,
        "sets": number,
        "times": times,
        "errors": errors,
    }


def run(samples: int, with_compile: bool, out: Path) -> None:
    """Measure all points on the current GPU."""
    stopwatch = STOPWATCHES["cuda"]()
    results = [measure(stopwatch, point, samples) for point in points(with_compile)]
    machine.write(out, "bench_weights.py --device cuda", results, samples=samples, gpu=machine.gpu())
