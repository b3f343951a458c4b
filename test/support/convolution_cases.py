"""Convolutions that PyTorch computes wrong on some CPUs, and random ones.

As a script, for a process of its own:

    python convolution_cases.py named {ours,pytorch} [NUMBER ...]   # runs all or these, each in a fork, which may die
    python convolution_cases.py random {ours,pytorch} SEED COUNT

It prints the cases whose outputs or gradients are wrong, with the largest relative error against float64.
"""

import importlib
import math
import os
import random
import sys
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from activations import channels_last

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
TOLERANCES = {F32: 1e-4, BF16: 3e-2, F16: 1e-2}


class Case(NamedTuple):
    """A call: the function's name, the shapes, the arguments after the bias, and what requires a gradient."""

    name: str
    input: tuple[int, ...]
    weight: tuple[int, ...]
    arguments: tuple[Any, ...]
    dtype: torch.dtype = F32
    required: str = "xw"
    formats: tuple[bool, bool] = (True, True)  # whether input and weight are channels-last


# Where the weight's gradient is wrong.
SMALL_INPUTS = [
    Case("conv3d", (2, 16, 2, 2, 2), (16, 16, 3, 3, 3), (1, 1), BF16),
    Case("conv3d", (2, 16, 4, 4, 4), (16, 16, 5, 5, 5), (1, 2), BF16),
    Case("conv3d", (2, 16, 7, 7, 7), (16, 16, 7, 7, 7), (2, 3)),
    Case("conv_transpose3d", (2, 64, 4, 4, 4), (64, 1, 7, 7, 7), (2, 3, 0, 64)),
    Case("conv3d", (2, 16, 5, 5, 5), (16, 16, 7, 7, 7), (2, 3)),
]
# Where the outputs are.
ONE_COLUMN = [
    Case("conv2d", (2, 4, 7, 2), (96, 1, 3, 7), ((1, 2), (1, 3), 1, 4), BF16, ""),
    Case("conv2d", (2, 4, 5, 2), (8, 1, 2, 2), ((1, 2), 0, 1, 4), BF16, ""),
    Case("conv2d", (2, 8, 3, 2), (16, 1, 5, 5), ((1, 2), 2, 1, 8), BF16, ""),
    Case("conv2d", (3, 1, 6, 5), (2, 1, 2, 7), ((1, 2), 1), F32, ""),
    Case("conv3d", (3, 1, 8, 10, 4), (8, 1, 7, 3, 4), ((1, 1, 3), 0, (1, 2, 1)), F32, ""),
    Case("conv3d", (3, 16, 1, 7, 1), (64, 1, 7, 2, 7), (1, (3, 0, 3), 1, 16), BF16, ""),
]
# Where the weight's gradient is wrong without AVX-512, on two threads; on one, the heap is damaged.
STRIDED_TAPS = [
    Case("conv2d", (4, 4, 56, 56), (64, 4, 1, 1), (2,)),
    Case("conv2d", (2, 3, 32, 32), (16, 3, 1, 1), (2, 1), F32, "xw", (True, False)),
    Case("conv2d", (3, 14, 17, 17), (32, 7, 1, 1), ((2, 1), 0, 1, 2), F32, "w"),
]
# In half precision, with AMX; PyTorch 2.15 is right for strides beyond the kernel.
STRIDE_BEYOND_KERNEL = Case("conv3d", (1, 48, 5, 6, 12), (7, 48, 1, 4, 2), ((4, 1, 1), (0, 1, 1)), BF16, "")
HALVES = [
    Case("conv2d", (1, 16, 9, 5), (16, 16, 3, 5), ((1, 2),), BF16, ""),
    Case("conv2d", (1, 16, 56, 56), (32, 16, 4, 4), (4,), BF16, ""),
    Case("conv2d", (1, 8, 9, 20), (16, 8, 3, 8), (), BF16, ""),
    Case("conv2d", (1, 8, 20, 16), (16, 8, 8, 1), (), BF16, ""),
    Case("conv_transpose3d", (3, 4, 2, 4, 5), (4, 2, 7, 7, 7), ((2, 3, 1), 0, (1, 0, 0), 1, (1, 1, 2)), BF16, ""),
    STRIDE_BEYOND_KERNEL,
    Case("conv2d", (1, 16, 14, 14), (16, 16, 7, 7), (7, 3), F16, ""),
    Case("conv2d", (2, 16, 40, 40), (16, 1, 3, 3), (1, 2, 2, 16), BF16),
    Case("conv3d", (1, 4, 8, 37, 32), (4, 1, 3, 5, 3), (1, 1, (1, 2, 1), 4), BF16),
]
# In half precision, with AVX-512 and without AMX.
HALVES_WITHOUT_AMX = [
    Case("conv2d", (1, 24, 30, 32), (8, 24, 3, 3), (1, 2, 2), BF16),
    Case("conv2d", (1, 9, 30, 32), (24, 3, 1, 1), (1, 0, (2, 1), 3), BF16),
    Case("conv_transpose2d", (1, 8, 30, 32), (8, 2, 3, 4), (1, 1, 0, 2, (2, 1)), BF16),
    Case("conv2d", (1, 16, 4, 4), (16, 16, 4, 4), (4,), BF16, ""),
    Case("conv3d", (1, 16, 8, 8, 8), (16, 16, 4, 4, 4), (8,), BF16, ""),
]
# Where no plane is under a tap, and where only the first is.
NO_TAP = [
    Case("conv3d", (2, 1, 1, 6, 6), (4, 1, 1, 3, 3), ((3, 1, 1), (1, 1, 1)), BF16),
    Case("conv3d", (2, 8, 5, 6, 6), (8, 8, 1, 3, 3), ((5, 1, 1), (0, 1, 1)), BF16),
]
# Where oneDNN has ended the process of others (https://github.com/pytorch/pytorch/issues/195394).
LONG_KERNEL = Case("conv2d", (1, 64, 1, 1), (64, 64, 125, 1), (2, (63, 0)), F32, "")
NAMED = [*SMALL_INPUTS, *ONE_COLUMN, *STRIDED_TAPS, *HALVES, *HALVES_WITHOUT_AMX, *NO_TAP, LONG_KERNEL]


def meets_input(size: int, positions: int, kernel: int, stride: int, padding: int, dilation: int) -> bool:
    """Return whether some tap of the kernel meets an input, along one axis, at some position."""
    return any(0 <= q * stride - padding + t * dilation < size for q in range(positions) for t in range(kernel))


def random_case(draw: random.Random) -> Case:
    """Return a case of any kind, small enough that every fault is among a few hundred.

    Those that are only padding along an axis are left out: oneDNN's forward may end the process. So are weights of less
    than four elements, whose gradients may be small differences of large sums.
    """
    axes, is_transposed, is_depthwise = draw.choice([2, 3]), draw.random() < 0.3, draw.random() < 0.35
    groups = draw.choice([1, 1, 2, 4, 8, 16])
    channels, outputs = (draw.choice([1, 2, 3, 4, 8, 16]) for _ in range(2))
    if is_depthwise:
        channels, outputs = 1, 1 if is_transposed else outputs
    most = draw.choice([1, 3, 5, 7])
    kernel = [draw.randint(1, most) for _ in range(axes)]
    stride = [draw.choice([1, 1, 2, 3]) for _ in range(axes)]
    dilation = [draw.choice([1, 1, 1, 2]) for _ in range(axes)]
    has_padding = draw.random() < 0.7
    padding = [draw.randint(0, (k * d + 1) // 2) if has_padding else 0 for k, d in zip(kernel, dilation)]
    required, dtype = draw.choice(["xw", "xw", "x", ""]), draw.choice([F32, F32, BF16, BF16, F16])
    formats, samples = (draw.random() < 0.7, draw.random() < 0.7), draw.choice([1, 2, 3])
    if is_transposed:
        more = [draw.randint(0, max(s, d) - 1) if draw.random() < 0.3 else 0 for s, d in zip(stride, dilation)]
        sizes = [draw.randint(1, 6) for _ in range(axes)]
        shape = (samples, channels * groups, *sizes)
        out = [
            (n - 1) * s - 2 * p + d * (k - 1) + m + 1
            for n, s, p, d, k, m in zip(sizes, stride, padding, dilation, kernel, more)
        ]
        is_fit = channels * groups * outputs * math.prod(kernel) >= 4 and min(out) >= 1
        if not is_fit or not all(map(meets_input, out, sizes, kernel, stride, padding, dilation)):
            return random_case(draw)
        arguments: tuple[Any, ...] = (stride, padding, more, groups, dilation)
        return Case(f"conv_transpose{axes}d", shape, (shape[1], outputs, *kernel), arguments, dtype, required, formats)
    sizes = [
        max(1, d * (k - 1) + 1 - 2 * p) + draw.choice([0, 0, 0, 1, 2, 5]) for k, d, p in zip(kernel, dilation, padding)
    ]
    out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in zip(sizes, padding, dilation, kernel, stride)]
    is_fit = outputs * groups * channels * math.prod(kernel) >= 4
    if not is_fit or not all(map(meets_input, sizes, out, kernel, stride, padding, dilation)):
        return random_case(draw)
    weight = (outputs * groups, channels, *kernel)
    arguments = (stride, padding, dilation, groups)
    return Case(f"conv{axes}d", (samples, channels * groups, *sizes), weight, arguments, dtype, required, formats)


def tensors_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an input and a weight."""
    made = [torch.randn(shape).to(case.dtype) for shape in (case.input, case.weight)]
    laid_out = [channels_last(each) if wanted else each for each, wanted in zip(made, case.formats)]
    return tuple(each.detach().requires_grad_(name in case.required) for each, name in zip(laid_out, "xw"))  # type: ignore[return-value]


def operands(case: Any, dtype: torch.dtype = F32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]:
    """Return an input and a weight in channels-last, a bias and the arguments after it.

    The case has a function's name, the shapes of both, and those arguments.
    """
    name, shape, kernel, arguments = case
    outputs = kernel[1] * (arguments[3] if len(arguments) > 3 else 1) if "transpose" in name else kernel[0]
    x, w = (channels_last(torch.randn(sizes)).to(dtype) for sizes in (shape, kernel))
    return x, w, torch.randn(outputs).to(dtype), arguments


def way_of(name: str, x: Any, w: Any, b: Any, arguments: tuple[Any, ...]) -> str:
    """Return the name of the way that a call takes, given the arguments after the bias."""
    axes, is_transposed = w.dim() - 2, "transpose" in name
    defaults = (1, 0, 0, 1, 1) if is_transposed else (1, 0, 1, 1)
    stride, padding, third, fourth, *more = (*arguments, *defaults[len(arguments) :])

    def each(value: Any) -> Any:
        return [value] * axes if isinstance(value, int) else value

    ask = torch.ops.nhwc.convolution_way
    if is_transposed:
        return str(ask(x, w, b, each(stride), each(padding), each(*more), fourth, each(third))[0])
    return str(ask(x, w, b, each(stride), each(padding), each(third), fourth)[0])


def error_of(case: Case, functions: Any) -> float:
    """Return the largest error of the output and the gradients, in units of what is allowed for the dtype."""
    x, w = tensors_of(case)
    exact = [each.detach().double().requires_grad_() for each in (x, w)]
    expected = getattr(F, case.name)(*exact, None, *case.arguments)
    gradient = torch.randn(expected.shape).to(case.dtype)
    out = getattr(functions, case.name)(x, w, None, *case.arguments)
    pairs = [(out, expected)]
    if case.required:
        leaves = [each for each in (x, w) if each.requires_grad]
        wanted = [real for each, real in zip((x, w), exact) if each.requires_grad]
        found = torch.autograd.grad(out, leaves, gradient)
        pairs += zip(found, torch.autograd.grad(expected, wanted, gradient.double()))
    pairs = [(got.detach().double(), real.detach()) for got, real in pairs]
    errors = [float((got - real).norm() / real.norm().clamp_min(1e-6)) for got, real in pairs]
    worst = max(float("inf") if error != error else error for error in errors)
    return worst / TOLERANCES[case.dtype]


def in_fork(case: Case, functions: Any) -> bool:
    """Return whether a case is right, in a process that may die."""
    child = os.fork()
    if child == 0:
        os._exit(0 if all(error_of(case, functions) <= 1 for _ in range(4)) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def main(kind: str, whose: str, *numbers: str) -> None:
    torch.set_num_threads(1)
    functions: Any = F
    if whose == "ours":
        from torch_nhwc import functional as functions
    if kind == "named":
        # The first gradient imports it, which takes longer than a case: once here, and not in each fork.
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
        torch.manual_seed(0)
        for index in map(int, numbers or range(len(NAMED))):
            if not in_fork(NAMED[index], functions):
                print(f"wrong: {index} {NAMED[index]}", flush=True)
        return
    seed, count = map(int, numbers)
    torch.manual_seed(seed)
    draw = random.Random(seed)
    for _ in range(count):
        case = random_case(draw)
        if not error_of(case, functions) <= 1:
            print(f"wrong: {case}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
