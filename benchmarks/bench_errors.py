"""The errors of convolutions with fewer multiplications, next to those of PyTorch's on contiguous memory.

    python benchmarks/bench_errors.py [--only TEXT] [--out FILE]

Errors are root mean squares of the difference from float64, of the output and of the gradients of input and weight. The
inputs are normal, rectified and far from zero; gradients of the rectified ones are zero in half of the places. Where
another way of the table is taken, it is that way's error.
"""

from typing import NamedTuple

import machine
import torch
from layout_models import channels_last
from torch import Tensor
from torch.nn import functional as stock

from torch_nhwc import functional as ours

RESULTS_OF_CALL = ("output", "input gradient", "weight gradient")
KINDS = ("normal", "rectified", "shifted")


class Case(NamedTuple):
    """A convolution with as many outputs as inputs, of three taps along each axis."""

    shape: tuple[int, ...]
    groups: int = 1
    is_transposed: bool = False
    padding: int = 1

    @property
    def label(self) -> str:
        groups = f"{self.groups} groups" if self.groups > 1 else ""
        padding = f"padding of {self.padding}" if self.padding != 1 else ""
        return ", ".join(filter(None, ("transposed" if self.is_transposed else "", groups, padding)))


# Small samples alone, which PyTorch computes by matrix products, and larger ones and batches, which oneDNN computes.
CASES = [
    *(Case((2, channels, 32, 32)) for channels in (32, 64)),
    Case((2, 512, 16, 16)),
    Case((1, 64, 56, 56)),
    *(Case((2, channels, 16, 16, 16)) for channels in (16, 64)),
    Case((2, 128, 8, 8, 8)),
    *(Case((1, channels, 8, 8, 8)) for channels in (32, 256)),
    Case((1, 64, 16, 16, 16)),
    Case((1, 32, 48, 48, 48)),
    Case((2, 64, 32, 32), is_transposed=True),
    Case((2, 128, 32, 32), groups=2),
    Case((2, 52, 16, 16, 16), groups=2),
    Case((4, 64, 13, 13, 7), is_transposed=True, padding=2),
    Case((2, 80, 16, 16, 16), groups=2, is_transposed=True),
]


def drawn(case: Case, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return an input, a weight and a gradient of the output."""
    torch.manual_seed(1)
    shape, axes, channels = case.shape, len(case.shape) - 2, case.shape[1]
    x, of_group = torch.randn(shape), channels // case.groups
    weight = torch.randn(channels, of_group, *(3,) * axes) / (of_group * 3**axes) ** 0.5
    grows = 2 * (1 - case.padding) if case.is_transposed else 2 * (case.padding - 1)
    gradient = torch.randn(*shape[:2], *(size + grows for size in shape[2:]))
    if kind == "rectified":
        return x.relu(), weight, gradient * (torch.rand(gradient.shape) > 0.5)
    return x + 10 if kind == "shifted" else x, weight, gradient


def computed(functions: object, case: Case, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """Return what `RESULTS_OF_CALL` names."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    function = getattr(functions, f"conv{'_transpose' if case.is_transposed else ''}{x.dim() - 2}d")
    out = function(x, weight, padding=case.padding, groups=case.groups)
    return out.detach(), *torch.autograd.grad(out, (x, weight), gradient)


def way_of(case: Case, x: Tensor, weight: Tensor) -> str:
    ones, padding, zeros = ([number] * (x.dim() - 2) for number in (1, case.padding, 0))
    arguments = (ones, padding, ones, case.groups, *((zeros,) if case.is_transposed else ()))
    ask = torch.ops.nhwc.convolution_way
    return str(ask(channels_last(x), channels_last(weight).requires_grad_(), None, *arguments)[0])


def measure(case: Case, kind: str) -> dict[str, object]:
    x, weight, gradient = drawn(case, kind)
    exact = computed(stock, case, x.double(), weight.double(), gradient.double())
    theirs = computed(stock, case, x, weight, gradient)
    own = computed(ours, case, *(channels_last(each) for each in (x, weight, gradient)))

    def error(of: tuple[Tensor, ...]) -> dict[str, float]:
        pairs = zip(RESULTS_OF_CALL, of, exact, strict=True)
        return {name: float((each - real).norm() / real.norm()) for name, each, real in pairs}

    errors = {"ours": error(own), "contiguous": error(theirs)}
    ratios = {name: errors["ours"][name] / errors["contiguous"][name] for name in RESULTS_OF_CALL}
    described = {"shape": list(case.shape), "layer": case.label, "kind": kind, "way": way_of(case, x, weight)}
    return {**described, "rms": errors, "over contiguous": ratios}


def main() -> None:
    parser = machine.parser(__doc__, machine.RESULTS / "errors-cpu.json")
    parser.add_argument("--only", default="", help="shapes whose text, such as 2x64x32x32, contains this")
    arguments = parser.parse_args()
    rows = []
    for case in CASES:
        for kind in KINDS if arguments.only in "x".join(map(str, case.shape)) else ():
            rows.append(measure(case, kind))
            print(case.shape, case.label, kind, rows[-1]["way"], rows[-1]["over contiguous"], flush=True)
    machine.write(arguments.out, "bench_errors.py", rows)


if __name__ == "__main__":
    main()
