"""Drop-ins for what is computed over windows in space: pools, circular padding, convolution, nearest upsampling.

TorchScript compiles all of it but `interpolate`: what it does not know stands behind `is_scripting`.
"""

from collections.abc import Sequence
from typing import Any, Optional, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch._jit_internal import BroadcastingList3, boolean_dispatched, is_scripting  # type: ignore[attr-defined]
from torch.nn.modules.utils import _list_with_default

from torch_nhwc.functional.routing import NONE, NUMBER, are, are_sizes, is_theirs


def avg_pool3d(
    input: Tensor,
    kernel_size: BroadcastingList3[int],
    stride: Optional[BroadcastingList3[int]] = None,  # noqa: UP045
    padding: BroadcastingList3[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Stands in for `torch.nn.functional.avg_pool3d`, which gives contiguous activations.

    Example:
        >>> x = torch.randn(2, 8, 4, 4, 4).to(memory_format=torch.channels_last_3d)
        >>> torch_nhwc.functional.avg_pool3d(x, 2).stride()
        (64, 1, 32, 16, 8)
    """
    if not is_scripting():
        is_usual = are_sizes(kernel_size, padding) and (stride is None or are_sizes(stride))
        is_usual = is_usual and are((bool,), ceil_mode, count_include_pad) and are((int, NONE), divisor_override)
        if is_theirs(input) or not is_usual:
            return F.avg_pool3d(input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    if stride is None:
        stride = kernel_size
    pooled: Tensor = torch.ops.nhwc.avg_pool3d(
        input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )
    return pooled


def adaptive_avg_pool3d(input: Tensor, output_size: BroadcastingList3[int]) -> Tensor:
    """Stands in for `torch.nn.functional.adaptive_avg_pool3d`, which gives contiguous activations.

    Example:
        >>> x = torch.randn(2, 8, 4, 4, 4).to(memory_format=torch.channels_last_3d)
        >>> torch_nhwc.functional.adaptive_avg_pool3d(x, (None, 2, 2)).stride()
        (128, 1, 32, 16, 8)
    """
    if not is_scripting():
        if is_theirs(input) or not _are_known(output_size):
            return F.adaptive_avg_pool3d(input, output_size)
        output_size = _each_way(output_size)
    sizes = _list_with_default(output_size, input.size())  # type: ignore[arg-type]
    pooled: Tensor = torch.ops.nhwc.adaptive_avg_pool3d(input, sizes)
    return pooled


def _are_known(output_size: Any) -> bool:
    """Those of `None` come from the input, as numbers that `torch.jit.trace` does not take in lists for operators."""
    return are_sizes(output_size, kinds=(int,) if torch._C._is_tracing() else (int, NONE))


def adaptive_max_pool3d(
    input: Tensor,
    output_size: BroadcastingList3[int],
    return_indices: bool = False,
) -> Any:
    """Stands in for `torch.nn.functional.adaptive_max_pool3d`, which gives contiguous activations.

    Example:
        >>> x = torch.randn(2, 8, 4, 4, 4).to(memory_format=torch.channels_last_3d)
        >>> pooled, indices = torch_nhwc.functional.adaptive_max_pool3d(x, 2, return_indices=True)
        >>> pooled.stride()
        (64, 1, 32, 16, 8)
    """
    if is_theirs(input) or not (_are_known(output_size) and are((bool,), return_indices)):
        return F.adaptive_max_pool3d(input, output_size, return_indices)  # type: ignore[call-overload]
    both = _max_with_indices(input, _each_way(output_size))
    return both if return_indices else both[0]


def _max_with_indices(
    input: Tensor, output_size: BroadcastingList3[int], return_indices: bool = True
) -> tuple[Tensor, Tensor]:
    sizes = _list_with_default(output_size, input.size())  # type: ignore[arg-type]
    pooled: tuple[Tensor, Tensor] = torch.ops.nhwc.adaptive_max_pool3d(input, sizes)
    return pooled


def _max_alone(input: Tensor, output_size: BroadcastingList3[int], return_indices: bool = False) -> Tensor:
    return _max_with_indices(input, output_size)[0]


# TorchScript calls one or the other, by an argument that must be a constant there, as for PyTorch's.
_choice: dict[str, Any] = {
    "if_true": _max_with_indices,
    "if_false": _max_alone,
    "index": 2,
    "default": False,
    "arg_name": "return_indices",
}
boolean_dispatched[adaptive_max_pool3d] = _choice


def lp_pool3d(
    input: Tensor,
    norm_type: int | float,
    kernel_size: BroadcastingList3[int],
    stride: Optional[BroadcastingList3[int]] = None,  # noqa: UP045
    ceil_mode: bool = False,
) -> Tensor:
    """Stands in for `torch.nn.functional.lp_pool3d`, which gives contiguous activations.

    Example:
        >>> x = torch.randn(2, 8, 4, 4, 4).to(memory_format=torch.channels_last_3d)
        >>> torch_nhwc.functional.lp_pool3d(x, 2, kernel_size=2).stride()
        (64, 1, 32, 16, 8)
    """
    # An infinite norm is a max pool, which keeps the format.
    if not is_scripting():
        is_usual = are_sizes(kernel_size) and (stride is None or are_sizes(stride)) and are((bool,), ceil_mode)
        if is_theirs(input) or not (is_usual and are(NUMBER, norm_type) and norm_type):
            return F.lp_pool3d(input, norm_type, kernel_size, stride, ceil_mode)
    if abs(norm_type) == float("inf"):
        return F.lp_pool3d(input, norm_type, kernel_size, stride, ceil_mode)
    if stride is None:
        stride = kernel_size
    pooled: Tensor = torch.ops.nhwc.lp_pool3d(input, float(norm_type), kernel_size, stride, ceil_mode)
    return pooled


def pad(input: Tensor, pad: list[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Stands in for `torch.nn.functional.pad`, in the mode `"circular"`; the other modes are PyTorch's.

    Example:
        >>> x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.pad(x, (1, 1, 1, 1), mode="circular").stride()
        (288, 1, 48, 8)
    """
    if not is_scripting():
        if is_theirs(input) or are((int,), pad) or not are_sizes(pad, count=2 * input.dim() - 4):
            return F.pad(input, pad, mode, value)
    if mode != "circular" or value is not None:
        return F.pad(input, pad, mode, value)
    padded: Tensor = torch.ops.nhwc.pad_circular(input, pad)
    return padded


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: BroadcastingList3[int] = 1,
    padding: BroadcastingList3[int] = 0,
    dilation: BroadcastingList3[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Stands in for `torch.nn.functional.conv3d`, which is many times slower on channels-last for kernels of one tap.

    Example:
        >>> x = torch.randn(2, 8, 4, 4, 4).to(memory_format=torch.channels_last_3d)
        >>> torch_nhwc.functional.conv3d(x, torch.randn(3, 8, 1, 1, 1), padding="valid").stride()
        (192, 1, 48, 12, 3)
    """
    if not is_scripting():
        is_usual = weight is not None and are_sizes(stride, dilation) and are((int,), groups)
        if is_usual and isinstance(padding, str):
            numbers = None if is_theirs(weight) else _padding_in_numbers(padding, weight, stride, dilation)
            if numbers is None:
                return F.conv3d(input, weight, bias, stride, padding, dilation, groups)
            padding = numbers
        if is_theirs(input, weight, bias) or not (is_usual and are_sizes(padding)):
            return F.conv3d(input, weight, bias, stride, padding, dilation, groups)
        stride, padding, dilation = _each_way(stride), _each_way(padding), _each_way(dilation)
    convolved: Tensor = torch.ops.nhwc.conv3d(input, weight, bias, stride, padding, dilation, groups)
    return convolved


def _each_way(value: Any) -> Any:
    """One number as three: the operators take no single one where a size may be symbolic."""
    return [value] * 3 if isinstance(value, int) else value


def _padding_in_numbers(padding: str, weight: Tensor, stride: Any, dilation: Any) -> list[int] | None:
    """The padding that a name means, equal on both sides; `None` where it is another on each, or an error."""
    if padding == "valid":
        return [0, 0, 0]
    strides, dilations = list(_each_way(stride)), list(_each_way(dilation))
    both = [step * (size - 1) for step, size in zip(dilations, weight.shape[2:])]
    is_even = padding == "same" and strides == [1, 1, 1] and len(both) == 3 and not any(each % 2 for each in both)
    return [each // 2 for each in both] if is_even else None


def interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Stands in for `torch.nn.functional.interpolate`, in 3D and for the nearest modes; the others are PyTorch's.

    Example:
        >>> x = torch.randn(2, 8, 4, 4, 4).to(memory_format=torch.channels_last_3d)
        >>> torch_nhwc.functional.interpolate(x, scale_factor=2).stride()
        (4096, 1, 512, 64, 8)
    """
    is_nearest = mode in ("nearest", "nearest-exact") and align_corners is None and not antialias
    if is_nearest and not recompute_scale_factor and not is_theirs(input) and input.dim() == 5:
        exact = mode == "nearest-exact"
        sizes, scales = _thrice(size, (int,)), _thrice(scale_factor, NUMBER)
        if sizes is not None and scale_factor is None:
            return cast(Tensor, torch.ops.nhwc.upsample_nearest3d(input, sizes, None, exact=exact))
        if scales is not None and size is None:
            factors = [float(scale) for scale in scales]
            return cast(Tensor, torch.ops.nhwc.upsample_nearest3d(input, None, factors, exact=exact))
    return F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)


def _thrice(value: Any, kinds: tuple[type, ...]) -> list[Any] | None:
    """One number for each of three dimensions; `None` where it is no such thing."""
    each = [value] * 3 if are(kinds, value) else value
    is_fit = isinstance(each, Sequence) and len(each) == 3 and are(kinds, *each)
    return list(each) if is_fit else None
