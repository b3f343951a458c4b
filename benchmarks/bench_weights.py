r"""One weight at a time, compared with memcpy and with what PyTorch does.

    python benchmarks/bench_weights.py [--large] [--device cpu|cuda] [--samples N] [--out FILE]

Every point takes its jobs in turn, `--samples` times; each sample is as many calls as take about a millisecond. The
figures are the minimum and the median of the samples in microseconds for one call. All buffers are hot and resident,
except in the jobs that allocate: there page faults are part of what a user sees, and `plain_clone` shows their share.
`--large` measures filters larger than the first cache instead, in weights as large as the last level of cache. It takes
a minute, memory of 12 times that cache, and a level of instructions:

    TORCH_NHWC_CPU_CAPABILITY=avx2 \
        python benchmarks/bench_weights.py --large --out benchmarks/results/weights-large-avx2-cpu.json

cuda_weights.py has what is done on a GPU, to other weights and with other jobs.
"""

import ctypes
import math
import random
from collections.abc import Callable
from functools import partial

import cuda_weights
import machine
import torch
from points import Point
from stopwatch import Stopwatch, in_turns, summary

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
LARGE = [((250, 7, 7), torch.float32), ((320, 3, 3, 3), torch.bfloat16), ((512, 3, 3, 3), torch.float32)]
CASTS = [(64, 64, 3, 3), (128, 128, 3, 3), (256, 256, 3, 3), (512, 512, 3, 3), (1280, 1280, 3, 3)]


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


def memcpy_job(nbytes: int) -> Callable[[], object]:
    source, destination = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    copy, arguments = ctypes.memmove, (destination.data_ptr(), source.data_ptr(), nbytes)
    return lambda keep=(source, destination): copy(*arguments)


def measure(point: Point, samples: int) -> dict[str, object]:
    shape, dtype, to = point.shape, point.dtype, point.to
    source_format, memory_format = point.formats
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
        placed = weight.clone()

        def in_place() -> None:
            placed.as_strided_(weight.shape, weight.stride())  # so that each call permutes in the same direction
            torch.ops.nhwc.convert_weight_(placed, memory_format, storage="reuse")

        jobs |= {
            "in_place": in_place,
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
    calls = max(1, (2 << 20) // max(weight.nbytes, 1 << 12))
    taken = in_turns({name: partial(Stopwatch().microseconds, job, calls) for name, job in jobs.items()}, samples)
    return {
        **point.described(),
        "bytes": weight.nbytes,
        "times": {name: summary(values) for name, values in taken.items()},
    }


def points() -> list[Point]:
    """Return the fixed grid and the random shapes."""
    ways = (False, True)
    grid = [Point(shape, dtype, back) for shape in SQUARES + TAPS + SMALL for dtype in DTYPES for back in ways]
    for index, shape in enumerate(random_shapes(40)):
        grid.append(Point(shape, DTYPES[index % len(DTYPES)], index % 3 == 0))
    for shape in CASTS:
        for dtype in (torch.bfloat16, torch.float16):
            for back in ways:
                grid += [Point(shape, torch.float32, back, dtype), Point(shape, dtype, back, torch.float32)]
    return grid


def large_filters() -> list[Point]:
    """Return weights as large as the last level of cache, of filters larger than the first."""
    return [
        Point((machine.cache_bytes("L3") // (math.prod(filters) * dtype.itemsize), *filters), dtype, back)
        for filters, dtype in LARGE
        for back in (False, True)
    ]


def main() -> None:
    parser = machine.parser(__doc__, None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--large", action="store_true", help="filters larger than the first cache")
    parser.add_argument("--samples", type=int, default=15)
    parser.add_argument("--without-compile", action="store_true", help="on a GPU")
    arguments = parser.parse_args()
    kind = "weights-large" if arguments.large else "weights"
    out = arguments.out or machine.RESULTS / f"{kind}-{arguments.device}.json"
    torch.manual_seed(0)
    if arguments.device == "cuda":
        return cuda_weights.run(arguments.samples, not arguments.without_compile, out)
    torch.set_num_threads(1)
    results = [measure(point, arguments.samples) for point in (large_filters() if arguments.large else points())]
    script = "bench_weights.py --large" if arguments.large else "bench_weights.py"
    machine.write(out, script, results, samples=arguments.samples)


if __name__ == "__main__":
    main()
