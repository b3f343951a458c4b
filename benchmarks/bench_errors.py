"""The errors of convolutions with fewer multiplications, next to those of PyTorch's on contiguous memory.

    python benchmarks/bench_errors.py [--only TEXT] [--out FILE]

Errors are root mean squares of the difference from float64, of the output and of the gradients of input and weight. The
inputs are normal, rectified and far from zero; gradients of the rectified ones are zero in half of the places. Where
another way of the table is taken, it is that way's error.
"""

import machine
import torch
from layout_models import channels_last
from torch import Tensor
from torch.nn import functional as stock

from torch_nhwc import functional as ours

RESULTS_OF_CALL = ("output", "input gradient", "weight gradient")
KINDS = ("normal", "rectified", "shifted")
# Small samples alone, which PyTorch computes by matrix products, and larger ones and batches, which oneDNN computes.
SHAPES = [
    *((2, channels, 32, 32) for channels in (32, 64, 128)),
    *((2, channels, 16, 16) for channels in (256, 512)),
    (1, 64, 56, 56),
    *((2, channels, 16, 16, 16) for channels in (16, 32, 64)),
    (2, 128, 8, 8, 8),
    *((1, channels, 8, 8, 8) for channels in (32, 64, 256)),
    (1, 64, 16, 16, 16),
    (1, 128, 16, 16, 16),
    (1, 32, 48, 48, 48),
]


def drawn(shape: tuple[int, ...], kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return an input, a weight and a gradient of the output."""
    torch.manual_seed(1)
    x, axes, channels = torch.randn(shape), len(shape) - 2, shape[1]
    weight = torch.randn(channels, channels, *(3,) * axes) / (channels * 3**axes) ** 0.5
    gradient = torch.randn(shape)
    if kind == "rectified":
        return x.relu(), weight, gradient * (torch.rand(shape) > 0.5)
    return x + 10 if kind == "shifted" else x, weight, gradient


def computed(functions: object, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Return what `RESULTS_OF_CALL` names."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = getattr(functions, f"conv{x.dim() - 2}d")(x, weight, padding=1)
    return out.detach(), *torch.autograd.grad(out, (x, weight), gradient)


def measure(shape: tuple[int, ...], kind: str) -> dict[str, object]:
    x, weight, gradient = drawn(shape, kind)
    exact = computed(stock, x.double(), weight.double(), gradient.double())
    theirs = computed(stock, x, weight, gradient)
    own = computed(ours, *(channels_last(each) for each in (x, weight, gradient)))
    axes = len(shape) - 2
    grouped = ([1] * axes, [1] * axes, [1] * axes, 1)
    way = torch.ops.nhwc.convolution_way(channels_last(x), channels_last(weight).requires_grad_(), None, *grouped)[0]

    def error(of: tuple[Tensor, ...]) -> dict[str, float]:
        pairs = zip(RESULTS_OF_CALL, of, exact, strict=True)
        return {name: float((each - real).norm() / real.norm()) for name, each, real in pairs}

    errors = {"ours": error(own), "contiguous": error(theirs)}
    ratios = {name: errors["ours"][name] / errors["contiguous"][name] for name in RESULTS_OF_CALL}
    return {"shape": list(shape), "kind": kind, "way": way, "rms": errors, "over contiguous": ratios}


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "errors-cpu.json")
    parser.add_argument("--only", default="", help="shapes whose text, such as 2x64x32x32, contains this")
    arguments = parser.parse_args()
    rows = []
    for shape in SHAPES:
        for kind in KINDS if arguments.only in "x".join(map(str, shape)) else ():
            rows.append(measure(shape, kind))
            print(shape, kind, rows[-1]["way"], rows[-1]["over contiguous"], flush=True)
    machine.write(arguments.out, "bench_errors.py", rows)


if __name__ == "__main__":
    main()
