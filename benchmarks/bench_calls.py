"""What a call costs by itself: converting one weight whose bytes need not move, and PyTorch's clone of it.

    python benchmarks/bench_calls.py [--samples N] [--out FILE]

The jobs take turns, `--samples` times; each sample is many calls, and a figure is the least of them in microseconds for
one call, on one thread. The operator is `torch.ops.nhwc.convert_weight` itself; PyTorch's binding looks into a memory
format that it is given, so that the operator without one, which means channels-last as well, is measured too.
"""

from collections.abc import Callable
from functools import partial

import machine
import torch
from points import Point
from stopwatch import Stopwatch, in_turns, summary

import torch_nhwc as nhwc

SHAPES = [(256, 64, 1, 1), (960, 1, 3, 3)]
CALLS_OF_A_SAMPLE = 200


def measure(shape: tuple[int, ...], requires_grad: bool, samples: int) -> dict[str, object]:
    weight = torch.randn(shape, requires_grad=requires_grad)
    operator, memory_format = torch.ops.nhwc.convert_weight, torch.channels_last
    jobs: dict[str, Callable[[], object]] = {
        "clone": lambda: weight.clone(memory_format=memory_format),
        "function": lambda: nhwc.convert_weight(weight, memory_format),
        "operator": lambda: operator(weight, memory_format),
        "function without format": lambda: nhwc.convert_weight(weight),
        "operator without format": lambda: operator(weight),
    }
    microseconds = Stopwatch().microseconds
    taken = in_turns({name: partial(microseconds, job, CALLS_OF_A_SAMPLE) for name, job in jobs.items()}, samples)
    times = {name: summary(values) for name, values in taken.items()}
    return {**Point(shape, torch.float32).described(), "requires_grad": requires_grad, "times": times}


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "calls-cpu.json")
    parser.add_argument("--samples", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(shape, gradient, arguments.samples) for shape in SHAPES for gradient in (False, True)]
    machine.write(arguments.out, "bench_calls.py", results, samples=arguments.samples)


if __name__ == "__main__":
    main()
