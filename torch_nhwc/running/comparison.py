"""Compare the outputs of two models, in whatever containers they come."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_nhwc.running.containers import tensors_in


class Difference(NamedTuple):
    """How far an output is from its reference."""

    largest: float
    """The largest difference of two elements at the same position; infinite where shapes differ."""
    of: float
    """The largest magnitude in the reference."""
    tolerance: float
    """How large the difference may be."""

    @property
    def is_within(self) -> bool:
        """Return whether the difference is within the tolerance."""
        return self.largest <= self.tolerance


def compare(output: Any, reference: Any, *dtypes: torch.dtype) -> Difference:
    """Return the difference of the tensors that are farthest apart, compared with their tolerance.

    The dtypes are those in which the model computes; the coarsest one decides.
    """
    ours, theirs = dict(tensors_in(output)), dict(tensors_in(reference))
    if ours.keys() != theirs.keys():
        return Difference(torch.inf, 0.0, 0.0)
    rtol = tolerance_of(dtypes).model
    found = [
        Difference(distances(tensor, theirs[name]).item(), size, size * rtol)
        for name, tensor in ours.items()
        for size in [magnitudes(theirs[name]).item()]
    ]
    return max(found, key=_share, default=Difference(0.0, 0.0, 0.0))


class Tolerance(NamedTuple):
    """How large a difference may be, in units of the largest value of the reference."""

    layer: float
    """For one layer: other kernels sum in another order. PyTorch's are ten times closer, inaccurate ones ten times
    farther away."""
    large_mean: float
    """For one layer on inputs with a mean of a thousand deviations, which has fewer digits left."""
    model: float
    """For a whole model's output: a deep network accumulates the rounding of its dtype."""
    model_gradients: float
    """For the gradients of a whole model, by `rms`: a rounding error that changes the sign at a ReLU changes single
    elements by as much as they are. In 16 bits the errors are as large as the gradients."""


TOLERANCES = {
    torch.float64: Tolerance(1e-10, 5e-9, 1e-10, 1e-4),
    torch.float32: Tolerance(1e-4, 5e-3, 1e-4, 0.1),
    torch.float16: Tolerance(4e-3, 2e-2, 5e-2, torch.inf),
    torch.bfloat16: Tolerance(2e-2, 2e-2, 2e-1, torch.inf),
}
_EIGHT_BITS = Tolerance(0.1, 0.1, 0.2, torch.inf)


def tolerance_of(dtypes: Iterable[torch.dtype]) -> Tolerance:
    """Return the tolerance of the coarsest floating-point dtype; zeros where there is none."""
    found = [
        TOLERANCES.get(each.to_real(), _EIGHT_BITS) for each in dtypes if each.is_floating_point or each.is_complex
    ]
    return Tolerance(*map(max, zip(*found))) if found else Tolerance(0.0, 0.0, 0.0, 0.0)


def largest(tensor: Tensor, dim: int | None = None) -> Tensor:
    """Return the largest element for each channel, whose dimension is `dim`; without it all is one channel."""
    others = [each for each in range(tensor.dim()) if each != dim]
    return tensor.amax(others).reshape(-1).double().cpu()


def rms(tensor: Tensor) -> Tensor:
    """Return the root of the mean square, as one channel."""
    return tensor.double().square().mean().sqrt().reshape(1).cpu()


def distances(a: Tensor | None, b: Tensor | None, reduce: Callable[[Tensor], Tensor] = largest) -> Tensor:
    """Return how far elements at the same position are from each other.

    Equal infinities and NaNs do not differ. Sums and norms of both tensors would not see a permutation. `None` stands
    for zeros, and `reduce` makes a number for each channel of the differences.
    """
    if a is None or b is None:
        return magnitudes(a if b is None else b, reduce)
    if a.shape != b.shape:
        return torch.tensor([torch.inf], dtype=torch.float64)
    a, b = _as_real(a), _as_real(b)
    difference = (a - b).abs_()
    difference.masked_fill_((a == b) | (a.isnan() & b.isnan()), 0)
    return _reduced(difference.nan_to_num_(torch.inf, torch.inf), reduce)


def magnitudes(tensor: Tensor | None, reduce: Callable[[Tensor], Tensor] = largest) -> Tensor:
    """Return how large the finite elements of a tensor are; 0 where there is none."""
    return _reduced(torch.zeros(0) if tensor is None else _as_real(tensor).abs().nan_to_num_(0, 0), reduce)


def _share(difference: Difference) -> float:
    if difference.tolerance:
        return difference.largest / difference.tolerance
    return torch.inf if difference.largest else 0.0


def _as_real(tensor: Tensor) -> Tensor:
    """Convert a tensor to a dtype in which differences are exact enough."""
    tensor = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    is_short = tensor.is_floating_point() and tensor.element_size() < 4
    return tensor.float() if is_short else tensor if tensor.dtype == torch.float32 else tensor.double()


def _reduced(tensor: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    return reduce(tensor) if tensor.numel() else torch.zeros(1, dtype=torch.float64)
