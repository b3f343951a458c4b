r"""One weight at a time, compared with copies and with what PyTorch does.

    python benchmarks/bench_weights.py [--large] [--device cpu|cuda] [--samples N] [--out FILE]

Every point takes its jobs in turn, `--samples` times; each sample is as many calls as take about a millisecond. The
figures are the minimum and the median of the samples in microseconds for one call. `plain_copy` moves as many bytes as
a conversion reads and writes.

On a CPU all buffers are hot and resident, except in the jobs that allocate: there page faults are part of what a user
sees, and `plain_clone` shows their share. `--large` measures filters larger than the first cache instead, in weights as
large as the last level of cache. It takes a minute, memory of 12 times that cache, and a level of instructions:

    TORCH_NHWC_CPU_CAPABILITY=avx2 \
        python benchmarks/bench_weights.py --large --out benchmarks/results/weights-large-avx2-cpu.json

On a GPU the times are device times: the calls go through sets of weights that are together four times the second-level
cache, read and written, in a CUDA graph (stopwatch.py).
"""

import ctypes
import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

import machine
import torch
from stopwatch import STOPWATCHES, Call, interleaved, sets_beyond_cache
from torch import Tensor

from torch_nhwc.layout import CHANNELS_LAST

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float64]
HALVES = [torch.bfloat16, torch.float16]
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
LARGE = [((250, 7, 7), torch.float32), ((320, 3, 3, 3), torch.bfloat16), ((512, 3, 3, 3), torch.float32)]
CASTS = [(64, 64, 3, 3), (128, 128, 3, 3), (256, 256, 3, 3), (512, 512, 3, 3), (1280, 1280, 3, 3)]
# On a GPU.
KERNELS = [(2, 2), (2, 2, 2), (3, 3), (4, 4), (5, 5), (3, 3, 3), (7, 7), (5, 5, 5)]
OF_THE_BARS = [(3, 3), (5, 5), (3, 3, 3), (7, 7)]
SMALL_ON_GPU = [(64, 64, 3, 3), (256, 128, 2, 2), (256, 256, 3, 3), (64, 64, 3, 3, 3), (64, 3, 7, 7), (512, 512, 3, 3)]
LARGE_ON_GPU = 16 << 20  # bytes


class Point(NamedTuple):
    """A conversion, and whether the compiler's is measured as well."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    back: bool = False
    to: torch.dtype | None = None
    with_compile: bool = False

    @property
    def formats(self) -> tuple[torch.memory_format, torch.memory_format]:
        """The formats of the source and of the result."""
        channels_last = CHANNELS_LAST[len(self.shape)]
        return (channels_last, torch.contiguous_format) if self.back else (torch.contiguous_format, channels_last)

    def described(self) -> dict[str, object]:
        """Return the point as a part of a result."""
        dtype, to = (each and str(each).removeprefix("torch.") for each in (self.dtype, self.to))
        return {"shape": list(self.shape), "dtype": dtype, "to": to, "back": self.back}


def random_shapes(count: int) -> list[tuple[int, ...]]:
    """Return shapes of all proportions, up to 8 MB of float32, the same ones every time."""
    generator = random.Random(4)
    shapes: list[tuple[int, ...]] = []
    while len(shapes) < count:
        kernel = tuple(generator.choice([1, 2, 3, 4, 5, 7]) for _ in range(generator.choice([2, 3])))
        shape = (generator.randint(1, 512), round(2 ** generator.uniform(0, 10)), *kernel)
        if math.prod(kernel) > 1 and shape[1] > 1 and math.prod(shape) <= 2 << 20:
            shapes.append(shape)
    return shapes


def points() -> Iterator[Point]:
    """Yield the fixed grid and the random shapes."""
    ways = (False, True)
    yield from (Point(shape, dtype, back) for shape in SQUARES + TAPS + SMALL for dtype in DTYPES for back in ways)
    for index, shape in enumerate(random_shapes(40)):
        yield Point(shape, DTYPES[index % len(DTYPES)], index % 3 == 0)
    for shape in CASTS:
        for dtype in HALVES:
            for back in ways:
                yield Point(shape, torch.float32, back, dtype)
                yield Point(shape, dtype, back, torch.float32)


def large_filters() -> Iterator[Point]:
    """Yield weights as large as the last level of cache, of filters larger than the first."""
    for filters, dtype in LARGE:
        for back in (False, True):
            yield Point((machine.cache_bytes("L3") // (math.prod(filters) * dtype.itemsize), *filters), dtype, back)


def points_on_gpu(with_compile: bool) -> Iterator[Point]:
    """Yield weights of 256 channels, as large as caches and larger, and small ones."""

    def shape(kernel: tuple[int, ...], nbytes: int, dtype: torch.dtype) -> tuple[int, ...]:
        return (math.ceil(nbytes / (256 * math.prod(kernel) * dtype.itemsize)), 256, *kernel)

    for back in (False, True):
        for dtype in DTYPES:
            for kernel in KERNELS:
                is_compiled = with_compile and not back and kernel in OF_THE_BARS and dtype in DTYPES[:2]
                yield Point(shape(kernel, LARGE_ON_GPU, dtype), dtype, back, with_compile=is_compiled)
        for kernel in OF_THE_BARS:
            for dtype in DTYPES[:3]:
                yield Point(shape(kernel, 4 * LARGE_ON_GPU, dtype), dtype, back)
            for narrow in HALVES:
                yield Point(shape(kernel, LARGE_ON_GPU, narrow), torch.float32, back, narrow)
                yield Point(shape(kernel, LARGE_ON_GPU, narrow), narrow, back, torch.float32)
    yield from (Point(shape, dtype) for shape in SMALL_ON_GPU for dtype in DTYPES[:2])


class Buffers(NamedTuple):
    """One set of memory."""

    weight: Tensor
    out: Tensor
    copied: Tensor
    copy: Tensor


def buffers_of(point: Point, device: str) -> Buffers:
    source_format, memory_format = point.formats
    values = torch.randint(0, 100, point.shape, dtype=torch.uint8, device=device)
    weight = torch.empty(point.shape, dtype=point.dtype, device=device, memory_format=source_format).copy_(values)
    out = torch.empty(point.shape, dtype=point.to or point.dtype, device=device, memory_format=memory_format)
    copied, copy = (torch.zeros((weight.nbytes + out.nbytes) // 2, dtype=torch.uint8, device=device) for _ in range(2))
    return Buffers(weight, out, copied, copy)


def compiled_clone(memory_format: torch.memory_format) -> Callable[[Tensor], Tensor]:
    torch._dynamo.reset()
    return torch.compile(lambda weight: weight.clone(memory_format=memory_format))


def jobs_of(point: Point, on: Buffers) -> dict[str, Call]:
    """Return the jobs that every device has."""
    weight, out, to = on.weight, on.out, point.to
    copy_weight_, convert_weight = torch.ops.nhwc.copy_weight_, torch.ops.nhwc.convert_weight
    return {
        "ours": lambda: copy_weight_(out, weight),
        "ours_fresh": lambda: convert_weight(weight, point.formats[1], dtype=to),
        "plain_copy": lambda: on.copy.copy_(on.copied),
        "eager_copy": lambda: out.copy_(weight),
        **({"eager_two_steps": lambda: out.copy_(weight.to(to))} if to else {}),
    }


def jobs_on_gpu(point: Point, sets: list[Buffers]) -> dict[str, list[Call]]:
    """Return the calls of each job, one with each set of memory."""
    memory_format = point.formats[1]
    jobs: dict[str, list[Call]] = {}
    clone = compiled_clone(memory_format) if point.with_compile else None
    for on in sets:
        made = jobs_of(point, on)
        if point.to is None:
            made["eager_contiguous"] = lambda on=on: on.weight.contiguous(memory_format=memory_format)
        if clone:
            made["compiled_clone"] = lambda on=on: clone(on.weight)
        for name, call in made.items():
            jobs.setdefault(name, []).append(call)
    return jobs


def jobs_on_cpu(point: Point, on: Buffers) -> dict[str, list[Call]]:
    memory_format, weight = point.formats[1], on.weight
    jobs = {"memcpy": memcpy_job(weight.nbytes), **jobs_of(point, on)}
    if point.to:
        jobs["eager_one_step"] = jobs.pop("eager_copy")
    else:
        placed = weight.clone()

        def in_place() -> None:
            placed.as_strided_(weight.shape, weight.stride())  # so that each call permutes in the same direction
            torch.ops.nhwc.convert_weight_(placed, memory_format, storage="reuse")

        jobs |= {
            "in_place": in_place,
            "eager_clone": lambda: weight.clone(memory_format=memory_format),
            "plain_clone": lambda: weight.clone(),
        }
    return {name: [job] for name, job in jobs.items()}


def memcpy_job(nbytes: int) -> Call:
    source, destination = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    copy, arguments = ctypes.memmove, (destination.data_ptr(), source.data_ptr(), nbytes)
    return lambda keep=(source, destination): copy(*arguments)


def measure(point: Point, samples: int, device: str = "cpu") -> dict[str, object]:
    stopwatch = STOPWATCHES[device]()
    first = buffers_of(point, stopwatch.device)
    torch.ops.nhwc.copy_weight_(first.out, first.weight)
    assert torch.equal(first.out, first.weight.to(first.out.dtype))
    if device == "cpu":
        sets, jobs = [first], jobs_on_cpu(point, first)
    else:
        number = sets_beyond_cache(stopwatch, first.weight.nbytes + first.out.nbytes)
        sets = [first, *(buffers_of(point, stopwatch.device) for _ in range(number - 1))]
        jobs = jobs_on_gpu(point, sets)
    times, errors = interleaved(stopwatch, jobs, samples)
    nbytes = {"bytes": first.weight.nbytes, "copied_bytes": first.copied.nbytes, "sets": len(sets)}
    return {**point.described(), **nbytes, "times": times, "errors": errors}


def main() -> None:
    parser = machine.parser(__doc__, None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--large", action="store_true", help="filters larger than the first cache")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--without-compile", action="store_true", help="on a GPU")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    kind, option = ("weights-large", " --large") if arguments.large else ("weights", "")
    chosen, how = (large_filters() if arguments.large else points()), {}
    if arguments.device == "cuda":
        chosen, option, how = points_on_gpu(not arguments.without_compile), " --device cuda", {"gpu": machine.gpu()}
    results = [measure(point, arguments.samples, arguments.device) for point in chosen]
    out = arguments.out or machine.RESULTS / f"{kind}-{arguments.device}.json"
    machine.write(out, f"bench_weights.py{option}", results, samples=arguments.samples, **how)


if __name__ == "__main__":
    main()
