"""How far two tensors are apart, by position, and how far they may be."""

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor

from torch_nhwc.verifying.inputs import is_image

# How far a layer's result may lie from the reference's, in units of its channel's largest value, where kernels add in
# another order; and where means are a thousand deviations, of which fewer digits are left. PyTorch's kernels are an
# order of magnitude nearer, and those that lose accuracy an order of magnitude farther away.
_RTOL = {
    torch.float64: (1e-10, 5e-9),
    torch.float32: (1e-4, 5e-3),
    torch.float16: (4e-3, 2e-2),
    torch.bfloat16: (2e-2, 2e-2),
}
_OTHER = (0.1, 0.1)  # eight bits
# What is allowed on top, in units of the noise floor: the largest of a few errors of a kind is not the largest of all.
FLOORS = 4


def distances(a: Tensor | None, b: Tensor | None, dim: int | None = None) -> Tensor:
    """The largest difference of elements at the same position, by channel; equal infinities and NaNs are none.

    Sums, norms and hashes of a scrambled tensor are what they were; this is not.

    Args:
        a: a tensor; no gradient is one of zeros.
        b: another one.
        dim: which dimension is that of the channels; all is one channel without it.
    """
    if a is None or b is None:
        return magnitudes(a if b is None else b, dim)
    if a.shape != b.shape:
        return torch.tensor([torch.inf], dtype=torch.float64)
    a, b = _as_real(a), _as_real(b)
    difference = (a - b).abs_()
    difference.masked_fill_((a == b) | (a.isnan() & b.isnan()), 0)
    return _by_channel(difference.nan_to_num_(torch.inf, torch.inf), dim)


def magnitudes(tensor: Tensor | None, dim: int | None = None) -> Tensor:
    """The largest magnitude of the finite elements, by channel; 0 where there is none."""
    return _by_channel(torch.zeros(0) if tensor is None else _as_real(tensor).abs().nan_to_num_(0, 0), dim)


def channel_dim(tensor: Tensor | None, is_weight: bool) -> int | None:
    """That of an image's channels or a weight's filters, each of which has a magnitude of its own."""
    return int(not is_weight) if tensor is not None and is_image(tensor) else None


def noise_floor(errors: Iterable[Tensor], size: Tensor) -> Tensor:
    """What the errors of a reference say of each channel.

    Those of few elements may be small by chance: at least what is usual for a channel, as such and for its magnitude.
    """
    own = reduce(torch.maximum, errors)
    return own.maximum(own.median()).maximum((own / size).nan_to_num_(0, 0).median() * size)


def at(by_channel: Tensor, channel: int) -> float:
    """The value of a channel; that of all channels where they have one."""
    return by_channel[min(channel, len(by_channel) - 1)].item()


def worst_channel(error: Tensor, allowed: Tensor) -> int:
    """The channel in which an error is largest in units of what is allowed."""
    return int((error / allowed).nan_to_num_(0, torch.inf).argmax())


def rtol_for(tensors: Iterable[Tensor], has_large_mean: bool = False) -> float:
    """What the coarsest dtype of some tensors, or of an autocast region around the call, asks for."""
    dtypes = set()
    for tensor in tensors:
        if can_have_gradient(tensor):
            dtypes.add(tensor.dtype.to_real())
        if torch.is_autocast_enabled(tensor.device.type):
            dtypes.add(torch.get_autocast_dtype(tensor.device.type))
    return max((_RTOL.get(dtype, _OTHER)[has_large_mean] for dtype in dtypes), default=0.0)


def can_have_gradient(tensor: Tensor) -> bool:
    """Whether a tensor is of a dtype that gradients have."""
    return tensor.is_floating_point() or tensor.is_complex()


def _as_real(tensor: Tensor) -> Tensor:
    """Of a dtype in which differences are exact enough."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    is_short = tensor.is_floating_point() and tensor.element_size() < 4
    return tensor.float() if is_short else tensor if tensor.dtype == torch.float32 else tensor.double()


def _by_channel(tensor: Tensor, dim: int | None) -> Tensor:
    if tensor.numel() == 0:
        return torch.zeros(1, dtype=torch.float64)
    others = [each for each in range(tensor.dim()) if each != dim]
    return tensor.amax(others).reshape(-1).double().cpu()
