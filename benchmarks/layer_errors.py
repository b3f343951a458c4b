"""How far the norms are from float64, on data whose mean is up to thousands of times its deviation."""

from collections.abc import Collection, Iterator, Sequence
from functools import partial

import torch
from layer_cases import FUNCTIONS, Call, Case, batch_norm, group_norm, instance_norm
from layout_models import channels_last
from torch import Tensor
from torch.nn import functional as stock

MEANS = (0, 3, 10, 100, 1000, 3000)
CASES = [
    Case("group_norm", "4", (2, 16, 64, 64), partial(group_norm, 4), ((16,),) * 2),
    Case("group_norm", "4", (2, 16, 24, 24, 24), partial(group_norm, 4), ((16,),) * 2),
    Case("instance_norm", "affine", (2, 16, 64, 64), instance_norm, ((16,),) * 2),
    Case("instance_norm", "affine", (2, 16, 24, 24, 24), instance_norm, ((16,),) * 2),
    Case("batch_norm", "training", (2, 16, 64, 64), batch_norm, ((16,),) * 2),
    Case("batch_norm", "training", (2, 16, 64, 64, 64), batch_norm, ((16,),) * 2),
]
NAMES = ("out", "dx", "dw", "db")
# So many times the error of PyTorch's on contiguous, at most.
LIMIT = 2.0


def results(call: Call, x: Tensor, weight: Tensor, bias: Tensor, gradient: Tensor) -> list[Tensor]:
    """Return the results that `NAMES` names, in float64."""
    leaves = [each.detach().requires_grad_() for each in (x, weight, bias)]
    out = call(*leaves)
    return [each.detach().double() for each in (out, *torch.autograd.grad(out, leaves, gradient))]


def errors(case: Case, dtype: torch.dtype, mean: int, corner: bool) -> dict[str, dict[str, float]]:
    """Return, for each way, the largest error of each result in units of its largest value."""
    torch.manual_seed(0)
    x = torch.randn(case.shape) + mean
    if corner:
        x[(slice(None), slice(None)) + (0,) * (x.dim() - 2)] = 0
    tensors = [x, torch.randn(case.shape[1]), torch.randn(case.shape[1]), torch.randn(case.shape)]
    x, weight, bias, gradient = (each.to(dtype) for each in tensors)
    expected = results(case.of(stock), *(each.double() for each in (x, weight, bias, gradient)))
    found = {}
    for way, functions in FUNCTIONS.items():
        laid_out = [each if way == "contiguous" else channels_last(each) for each in (x, gradient)]
        measured = results(case.of(functions), laid_out[0], weight, bias, laid_out[1])
        found[way] = {
            name: ((a - b).abs().max() / b.abs().max()).item() for name, a, b in zip(NAMES, measured, expected)
        }
    return found


def rows(case: Case, dtype: torch.dtype) -> Iterator[dict[str, object]]:
    for mean in MEANS:
        for corner in (False, True):
            found = errors(case, dtype, mean, corner)
            # An error below the rounding of one operation is none, and nothing is a multiple of it.
            least = torch.finfo(dtype).eps / 8
            ratios = {name: found["ours"][name] / max(found["contiguous"][name], least) for name in NAMES}
            yield {
                "layer": case.layer,
                "shape": list(case.shape),
                "dtype": str(dtype).removeprefix("torch."),
                "mean_over_deviation": mean,
                "corner": corner,
                "errors": found,
                "over_contiguous": ratios,
                "limit": LIMIT,
            }


def measure_errors(layers: Collection[str], dtypes: Sequence[torch.dtype]) -> list[dict]:
    """Return a row for each named norm, dtype and mean, with and without one corner at zero."""
    return [row for case in CASES if case.layer in layers for dtype in dtypes for row in rows(case, dtype)]
