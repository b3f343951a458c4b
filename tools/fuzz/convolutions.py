"""What PyTorch computes wrong on a CPU: drawn convolutions in both formats, forward and backward, against float64.

A case fails if the library would leave it to PyTorch, and PyTorch is wrong, or if the library's own result is wrong.
The figures count what else PyTorch computes wrong, by the kind of the convolution and by the way that the library goes
instead. A damaged heap may end a process or block it, so that each computation has a process of its own.
"""

import faulthandler
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from drawing import Convolution, draw_convolution, expect
from reference import FORMATS
from torch import Tensor

from torch_nhwc import functional

LAYOUTS = ("contiguous", "channels-last")
# The largest error that counts as right, in units of the largest value. Wrong results are mostly far from it.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
SECONDS = 30  # the longest time of a computation
Case = dict[str, Any]


def draw(random: Random) -> Case:
    return {
        "convolution": draw_convolution(random, random.choice((2, 3)), random.random() < 0.3),
        "dtype": random.choice([*LIMITS]),
        "threads": random.choice((1, 2)),
    }


def in_format(tensor: Tensor, layout: str) -> Tensor:
    """Return a tensor in a format, with canonical strides; `Tensor.to` would leave those of one channel."""
    wanted = FORMATS[tensor.dim()] if layout == "channels-last" else torch.contiguous_format
    return torch.empty_like(tensor, memory_format=wanted).copy_(tensor)


def way_of(case: Case, layout: str) -> tuple[str, str]:
    """Return the way that the library goes, and its kind."""
    drawn: Convolution = case["convolution"]
    x = torch.empty(drawn.batch, drawn.in_channels, *drawn.size, dtype=case["dtype"])
    tensors = [in_format(each, layout).requires_grad_() for each in (x, x.new_empty(drawn.weight))]
    bias = x.new_empty(drawn.out_channels) if drawn.bias else None
    more = (drawn.output_padding,) if drawn.transposed else ()
    name, kind, _ = torch.ops.nhwc.convolution_way(
        *tensors, bias, drawn.stride, drawn.padding, drawn.dilation, drawn.groups, *more
    )
    return name, kind


def compute(functions: Any, drawn: Convolution, tensors: dict[str, Tensor], gradient: Tensor) -> dict[str, Tensor]:
    """Return the output and all gradients."""
    given = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    function = getattr(functions, f"conv{'_transpose' if drawn.transposed else ''}{len(drawn.size)}d")
    last = (drawn.output_padding, drawn.groups, drawn.dilation) if drawn.transposed else (drawn.dilation, drawn.groups)
    y = function(given["input"], given["weight"], given.get("bias"), drawn.stride, drawn.padding, *last)
    y.backward(gradient)
    return {"output": y.detach(), **{name: each.grad for name, each in given.items() if each.grad is not None}}


def errors(case: Case, layout: str, functions: Any) -> dict[str, float]:
    """Return how far the output and each gradient are from float64, in units of the largest value."""
    drawn: Convolution = case["convolution"]
    shapes = {"input": (drawn.batch, drawn.in_channels, *drawn.size), "weight": drawn.weight}
    shapes |= {"bias": (drawn.out_channels,)} if drawn.bias else {}
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape).to(case["dtype"]) for name, shape in shapes.items()}
    gradient = torch.randn(drawn.batch, drawn.out_channels, *drawn.output).to(case["dtype"])
    exact = compute(F, drawn, {name: each.double() for name, each in tensors.items()}, gradient.double())
    given = {name: in_format(each, layout) if each.dim() > 1 else each for name, each in tensors.items()}
    found = compute(functions, drawn, given, in_format(gradient, layout))
    return {
        name: ((found[name].double() - each).abs().max() / each.abs().max().clamp_min(1e-6)).item()
        for name, each in exact.items()
    }


def forked(case: Case, layout: str, functions: Any) -> tuple[list[Any], int]:
    """Return the way and the errors, or what was raised, from a process of its own, and the signal that ended it."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        faulthandler.disable()
        faulthandler.unregister(signal.SIGALRM)
        signal.alarm(SECONDS)
        try:
            with os.fdopen(writing, "w", buffering=1) as out:
                out.writelines(json.dumps(each) + "\n" for each in answers(case, layout, functions))
        finally:  # Never return into a copy of this process.
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        found = [json.loads(line) for line in lines if line.endswith("\n")]
    return found, os.waitpid(child, 0)[1] & 0x7F


def answers(case: Case, layout: str, functions: Any) -> Iterator[Any]:
    torch.set_num_threads(case["threads"])  # which ways may depend on
    name, kind = way_of(case, layout)
    # Whether PyTorch is right where channels-last has a faster way, its contiguous convolution tells.
    yield name, kind, way_of(case, "contiguous")[1] if kind == "faster" else kind
    try:
        yield errors(case, layout, functions)
    except Exception as error:
        yield f"{type(error).__name__}: {error}".splitlines()[0]


def is_wrong(found: list[Any], case: Case) -> bool:
    """Return whether a result differs from float64, is not finite, or ended its process; an error is no result."""
    if len(found) < 2:
        return True
    result = found[1]
    return not isinstance(result, str) and not all(error <= LIMITS[case["dtype"]] for error in result.values())


@cache
def warm_up() -> None:
    """Load what every computation needs, on one thread: no thread of a pool outlives a fork."""
    torch.set_num_threads(1)
    for space in (2, 3):
        drawn = Convolution(False, 1, 1, 2, 2, *[(1,) * space] * 4, (0,) * space, (2,) * space, True)
        for dtype in LIMITS:
            errors({"convolution": drawn, "dtype": dtype}, LAYOUTS[0], functional)


def check(case: Case) -> dict[str, float]:
    warm_up()
    figures = Counter[str]()
    for layout in LAYOUTS:
        theirs, ended_by = forked(case, layout, F)
        name, kind, proved = theirs[0]
        is_bad, is_flagged = is_wrong(theirs, case), proved not in ("pytorchs", "faster")
        expect(is_flagged or not is_bad, f"{layout}, {name}: PyTorch is wrong: {theirs[1:] or ended_by}")
        if kind != "pytorchs":
            ours, ended_by = forked(case, layout, functional)
            expect(not is_wrong(ours, case), f"{layout}, {name}: ours is wrong: {ours[1:] or ended_by}")
            is_refused = isinstance(ours[1], str) and not isinstance(theirs[-1], str)
            expect(not is_refused, f"{layout}, {name}: ours raises: {ours[1]}")
        counted = {"cases": True, "flagged": is_flagged}
        what = f"{case['convolution'].kind} {str(case['dtype']).removeprefix('torch.')}, ours by {name}"
        counted |= {f"{what}: PyTorch wrong": is_bad, f"{what}: PyTorch died": len(theirs) < 2}
        counted |= {f"{what}: PyTorch raised": isinstance(theirs[-1], str)}
        figures.update({f"{layout}: {each}": int(is_so) for each, is_so in counted.items()})
    return {what: count for what, count in figures.items() if count}
