"""A large weight that meets few positions, over reading it once: the last layers of a network with one image.

    OMP_NUM_THREADS=1 python benchmarks/bench_positions.py [--seconds S] [--out FILE]

Calls go through so many weights that none is in a cache. The C library's search for a byte that is not there reads as
many bytes, in turns with the calls. Times are minima over rounds, of one call, on one thread.
"""

import ctypes
import math
from functools import partial

import machine
import torch
from bench_convolutions import Layer, peak, way_of
from layout_models import channels_last
from stopwatch import Stopwatch, in_turns

from torch_nhwc import functional

LAYERS = [
    Layer("one image", 1, channels, outputs, size, kernel)
    for channels, outputs, kernel in ((512, 512, 3), (2048, 1280, 1))
    for size in (2, 3, 5, 7)
]
BEYOND_CACHES = 128 << 20


@torch.no_grad()
def measure(layer: Layer, seconds: float, top: float) -> dict[str, object]:
    """Return one row: microseconds of the call and of reading, and what the products take at the peak."""
    x, weight, bias = (channels_last(each) if each.dim() > 1 else each for each in layer.tensors(torch.float32))
    weights = [channels_last(weight) for _ in range(math.ceil(BEYOND_CACHES / weight.nbytes))]
    zeros = [torch.zeros_like(weight) for weight in weights]
    find = ctypes.CDLL(None).memchr
    find.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t

    def compute() -> None:
        for each in weights:
            layer.call(functional, x, each, bias)

    def read() -> None:
        for each in zeros:
            find(each.data_ptr(), 1, each.nbytes)

    stopwatch = Stopwatch()
    samples = max(5, math.ceil(seconds * 1e6 / (stopwatch.wall(compute) + stopwatch.wall(read))))
    taken = in_turns({"call": partial(stopwatch.wall, compute), "read": partial(stopwatch.wall, read)}, samples)
    times = {name: min(values) / len(weights) for name, values in taken.items()}
    return {
        "layer": layer.name,
        "weight": f"{layer.channels} to {layer.outputs}, {'x'.join(map(str, layer.taps))}",
        "bytes": weight.nbytes,
        "positions": layer.size**2,
        "way": way_of(layer, torch.float32, "forward"),
        "us": times,
        "over reading": times["call"] / times["read"],
        "products at the peak over reading": layer.flops / top / 1e3 / times["read"],
    }


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "positions-cpu.json")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each layer")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    top = peak()
    rows = []
    for layer in LAYERS:
        rows.append(row := measure(layer, arguments.seconds, top))
        print(f"{row['over reading']:.2f}  {row['products at the peak over reading']:.2f}  {layer.name}", flush=True)
    machine.write(arguments.out, "bench_positions.py", rows, **{"peak GFLOP/s": top})


if __name__ == "__main__":
    main()
