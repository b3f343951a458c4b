"""What a replaced convolution costs by itself: small tensors, on which the arithmetic is nothing.

    python benchmarks/bench_overhead.py [--rounds N] [--out FILE]

PyTorch's layer and its replacement take turns, `--rounds` times, on one thread; each sample is many calls. A row has
the medians in microseconds for one call, without gradients or with the backward, and that of the rounds' differences.
"""

import copy
import statistics
from collections.abc import Callable

import machine
import torch
from stopwatch import Stopwatch, in_turns
from tables import table
from torch import nn

from torch_nhwc.layout import CHANNELS_LAST
from torch_nhwc.nn.class_swap import swap_class
from torch_nhwc.nn.replacements import Preserving

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Conv2d 3x3": (lambda: nn.Conv2d(8, 8, 3, padding=1), (1, 8, 8, 8)),
    "Conv2d 3x3, depthwise": (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), (1, 8, 8, 8)),
    "Conv2d 3x3, depthwise, strided": (lambda: nn.Conv2d(8, 8, 3, 2, 1, groups=8), (1, 8, 8, 8)),
    "Conv2d 1x1": (lambda: nn.Conv2d(8, 8, 1), (1, 8, 8, 8)),
    "ConvTranspose2d 2x2, strided": (lambda: nn.ConvTranspose2d(8, 8, 2, 2), (1, 8, 8, 8)),
    "Conv2d 3x3 on 2x2 pixels": (lambda: nn.Conv2d(8, 8, 3, padding=1), (1, 8, 2, 2)),
    "Conv3d 3x3x3": (lambda: nn.Conv3d(8, 8, 3, padding=1), (2, 8, 4, 4, 4)),
    "Conv3d 3x3x3 on 2x2x2 voxels": (lambda: nn.Conv3d(8, 8, 3, padding=1), (2, 8, 2, 2, 2)),
    "ConvTranspose3d 2x2x2, strided": (lambda: nn.ConvTranspose3d(8, 8, 2, 2), (2, 8, 4, 4, 4)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(8), (1, 8, 8, 8)),
}
CALLS_OF_A_SAMPLE = 50
MODES = ("forward", "forward with backward")


def measure(name: str, rounds: int) -> list[dict[str, object]]:
    make, shape = LAYERS[name]
    memory_format = CHANNELS_LAST[len(shape)]
    stock = make().to(memory_format=memory_format)  # type: ignore[call-overload]
    replaced = copy.deepcopy(stock)
    swap_class(replaced, Preserving)
    x = torch.randn(shape).to(memory_format=memory_format).requires_grad_()
    gradient = torch.ones_like(stock(x))
    rows = []
    for mode in MODES:

        def call(layer: nn.Module, mode: str = mode) -> float:
            def run() -> None:
                with torch.set_grad_enabled(mode != "forward"):
                    out = layer(x)
                if mode != "forward":
                    out.backward(gradient)

            return Stopwatch().microseconds(run, CALLS_OF_A_SAMPLE)

        taken = in_turns({"stock": lambda: call(stock), "replaced": lambda: call(replaced)}, rounds)
        more = [ours - theirs for ours, theirs in zip(taken["replaced"], taken["stock"], strict=True)]
        medians = {key: statistics.median(values) for key, values in taken.items()}
        rows.append({"layer": name, "shape": shape, "mode": mode, **medians, "more": statistics.median(more)})
    return rows


def as_table(measured: dict) -> str:
    """Return the report's table: microseconds of a call, and how many more the replacement takes."""
    by_layer: dict[str, list[str]] = {}
    for row in measured["results"]:
        cells = by_layer.setdefault(row["layer"], [row["layer"], "x".join(map(str, row["shape"]))])
        cells += [f"{row['stock']:.0f}", f"{row['more']:+.0f}"]
    head = [cell for mode in MODES for cell in (f"{mode}: PyTorch's, us", "ours, more")]
    return table(["layer", "input", *head], by_layer.values())


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "overhead-cpu.json")
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = [row for name in LAYERS for row in measure(name, arguments.rounds)]
    machine.write(arguments.out, "bench_overhead.py", results, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
