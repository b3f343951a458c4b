"""One weight at a time, beside memcpy and beside what PyTorch does.

    python benchmarks/bench_weights.py [--device cpu|cuda] [--samples N] [--without-compile] [--out FILE]

Every point takes its jobs in turn, `--samples` times; each sample is as many calls as take about a millisecond. The
figures are the minimum and the median of the samples in microseconds for one call. All buffers are hot and resident,
except in the jobs that allocate: there page faults are part of what a user sees, and `plain_clone` shows their share.
cuda_weights.py has what is done on a GPU, to other weights and with other jobs.
"""

import argparse
import ctypes
import math
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import machine
import torch
from torch import Tensor

import torch_nhwc as nhwc
from torch_nhwc.sites import CHANNELS_LAST

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float64]
SQUARES = [(64, 64, 3, 3), (128, 128, 3, 3), (256, 256, 3, 3), (512, 512, 3, 3), (1024, 512, 3, 3), (1280, 1280, 3, 3)]
TAPS = [(256, 128, 1, 2), (256, 128, 2, 2), (64, 192, 4, 4), (64, 64, 5, 5), (64, 64, 3, 3, 3), (32, 96, 7, 7)]
TAPS += [(16, 64, 5, 5, 5), (8, 64, 7, 7, 7)]
SMALL = [
    (64, 3, 7, 7),
    (64, 3, 3, 3),
    (512, 4, 3, 3),
    (1024, 2, 3, 3),
    (256, 8, 3, 3),
    (256, 16, 3, 3),
    (128, 24, 5, 5),
]
CASTS = [(64, 64, 3, 3), (128, 128, 3, 3), (256, 256, 3, 3), (512, 512, 3, 3), (1280, 1280, 3, 3)]
COMPILED = [(128, 128, 3, 3), (512, 512, 3, 3), (64, 64, 3, 3, 3)]
LARGE = [(1024, 512, 3, 3), (1280, 1280, 3, 3)]


def random_shapes(count: int) -> list[tuple[int, ...]]:
    """Weights of all proportions, up to 8 MB of float32, the same ones every time."""
    generator = random.Random(4)
    shapes: list[tuple[int, ...]] = []
    while len(shapes) < count:
        kernel = tuple(generator.choice([1, 2, 3, 4, 5, 7]) for _ in range(generator.choice([2, 3])))
        shape = (generator.randint(1, 512), round(2 ** generator.uniform(0, 10)), *kernel)
        if math.prod(kernel) > 1 and shape[1] > 1 and math.prod(shape) <= 2 << 20:
            shapes.append(shape)
    return shapes


def interleaved(jobs: dict[str, Callable[[], object]], samples: int, nbytes: int) -> dict[str, dict[str, float]]:
    """The time of each job in microseconds, with the jobs taking turns."""
    calls = max(1, (2 << 20) // max(nbytes, 1 << 12))
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for sample in range(samples + 1):  # the first round warms up
        for name, job in jobs.items():
            start = time.perf_counter()
            for _ in range(calls):
                job()
            if sample:
                times[name].append((time.perf_counter() - start) / calls * 1e6)
    return {name: {"min": min(values), "median": statistics.median(values)} for name, values in times.items()}


def memcpy_job(nbytes: int) -> Callable[[], object]:
    source, destination = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    copy, arguments = ctypes.memmove, (destination.data_ptr(), source.data_ptr(), nbytes)
    return lambda keep=(source, destination): copy(*arguments)


def compiled_clone(memory_format: torch.memory_format) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    return torch.compile(lambda weight: weight.clone(memory_format=memory_format))


def measure(
    shape: tuple[int, ...], dtype: torch.dtype, back: bool, to: torch.dtype | None, samples: int, with_compile: bool
) -> dict[str, object]:
    """One point: a shape, a dtype, a direction, and a dtype to cast to."""
    formats = [torch.contiguous_format, CHANNELS_LAST[len(shape)]]
    source_format, memory_format = reversed(formats) if back else formats
    values = torch.randint(0, 100, shape).to(dtype)
    weight = torch.empty(shape, dtype=dtype, memory_format=source_format).copy_(values)
    out = torch.empty(shape, dtype=to or dtype, memory_format=memory_format)
    plain = torch.empty_like(weight)
    copy_weight_, convert_weight = torch.ops.nhwc.copy_weight_, torch.ops.nhwc.convert_weight
    copy_weight_(out, weight)
    assert torch.equal(out, weight.to(out.dtype))
    jobs: dict[str, Callable[[], object]] = {
        "memcpy": memcpy_job(weight.nbytes),
        "ours": lambda: copy_weight_(out, weight),
        "ours_fresh": lambda: convert_weight(weight, memory_format, dtype=to),
    }
    if to is None:
        jobs |= {
            "eager_copy": lambda: out.copy_(weight),
            "plain_copy": lambda: plain.copy_(weight),
            "eager_clone": lambda: weight.clone(memory_format=memory_format),
            "plain_clone": lambda: weight.clone(),
        }
    else:
        jobs |= {
            "eager_one_step": lambda: out.copy_(weight),
            "eager_two_steps": lambda: out.copy_(weight.to(to)),
        }
    if with_compile:
        clone = compiled_clone(memory_format)
        clone(weight)
        jobs["compiled_clone"] = lambda: clone(weight)
    return {
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "to": None if to is None else str(to).removeprefix("torch."),
        "back": back,
        "bytes": weight.nbytes,
        "threads": torch.get_num_threads(),
        "times": interleaved(jobs, samples, weight.nbytes),
    }


def points(with_compile: bool) -> list[tuple[tuple[int, ...], torch.dtype, bool, torch.dtype | None, int, bool]]:
    """The fixed grid and the random shapes, as arguments: shape, dtype, back, to, threads, with the compiler."""
    grid = []
    for shape in SQUARES + TAPS + SMALL:
        for dtype in DTYPES:
            for back in (False, True):
                grid.append((shape, dtype, back, None, 1, False))
    for index, shape in enumerate(random_shapes(40)):
        grid.append((shape, DTYPES[index % len(DTYPES)], index % 3 == 0, None, 1, False))
    for shape in CASTS:
        for dtype in (torch.bfloat16, torch.float16):
            for back in (False, True):
                grid += [(shape, torch.float32, back, dtype, 1, False), (shape, dtype, back, torch.float32, 1, False)]
    if with_compile:
        grid += [(shape, dtype, False, None, 1, True) for shape in COMPILED for dtype in DTYPES[:2]]
    grid += [(shape, dtype, back, None, 2, False) for shape in LARGE for dtype in DTYPES[:2] for back in (False, True)]
    return grid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--without-compile", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    arguments.out = arguments.out or machine.ROOT / f"benchmarks/results/weights-{arguments.device}.json"
    torch.manual_seed(0)
    if arguments.device == "cuda":
        import cuda_weights

        return cuda_weights.run(arguments.samples, not arguments.without_compile, arguments.out)
    results = []
    for *point, threads, with_compile in points(not arguments.without_compile):
        torch.set_num_threads(threads)
        results.append(measure(*point, arguments.samples, with_compile))
    machine.write(arguments.out, "bench_weights.py", results, samples=arguments.samples)
    print(f"{len(results)} points: {arguments.out}")


if __name__ == "__main__":
    assert nhwc.library_path()
    main()
