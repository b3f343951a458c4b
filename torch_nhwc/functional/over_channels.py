"""Drop-ins for what is computed over channels, or of each element: norms, softmax, cross entropy, GELU.

TorchScript compiles all of it: what it does not know stands behind `is_scripting`.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch._jit_internal import is_scripting
from torch.nn import _reduction as _Reduction  # noqa: N812
from torch.nn.functional import _verify_batch_size, _verify_spatial_size  # type: ignore[attr-defined]

from torch_nhwc.functional.routing import NUMBER, are, is_theirs

if TYPE_CHECKING:
    from torch import dtype as DType  # noqa: N812
else:
    DType = int  # which is a dtype in TorchScript


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Stands in for `torch.nn.functional.group_norm`, whose statistics are wrong on channels-last on a CPU.

    As accurate there as on contiguous activations, for any mean.

    Example:
        >>> x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.group_norm(x, num_groups=2).stride()
        (128, 1, 32, 8)
    """
    if not is_scripting():
        if is_theirs(input, weight, bias) or not (are((int,), num_groups) and are(NUMBER, eps)) or input.dim() < 2:
            return F.group_norm(input, num_groups, weight, bias, eps)
    if num_groups < 1 or input.numel() < 2 * num_groups:  # all that this may complain of
        _verify_batch_size([input.size(0) * input.size(1) // num_groups, num_groups] + list(input.size()[2:]))
    normed: Tensor = torch.ops.nhwc.group_norm(input, num_groups, weight, bias, eps)
    return normed


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Stands in for `torch.nn.functional.instance_norm`, whose gradient is wrong on channels-last for a batch of 1.

    Example:
        >>> x = torch.randn(1, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.instance_norm(x).stride()
        (128, 1, 32, 8)
    """
    if not is_scripting():
        is_usual = are((bool,), use_input_stats) and are(NUMBER, momentum, eps)
        if is_theirs(input, running_mean, running_var, weight, bias) or not is_usual:
            theirs = F.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
            is_compiled = torch.compiler.is_exporting() or (torch.compiler.is_compiling() and type(theirs) is Tensor)
            return _with_contiguous_gradient(theirs) if is_compiled and theirs.requires_grad else theirs
    if use_input_stats:
        _verify_spatial_size(input.size())
    normed: Tensor = torch.ops.nhwc.instance_norm(
        input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )
    return _with_contiguous_gradient(normed)


def _with_contiguous_gradient(normed: Tensor) -> Tensor:
    """What PyTorch's instance norm gives: for a batch of 1 its gradient is wrong where a channels-last one arrives.

    One that comes by way of a flat tensor is contiguous. No view, since an activation that writes in place may follow.
    """
    if normed.is_contiguous():
        normed = torch.ops.aten._unsafe_view(normed.flatten(), normed.size())
    return normed


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: DType | None = None) -> Tensor:
    """Stands in for `torch.nn.functional.softmax`, over the channels; other dimensions are PyTorch's.

    Example:
        >>> x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.softmax(x, dim=1).stride()
        (128, 1, 32, 8)
    """
    if not is_scripting():
        if is_theirs(input) or not are((int,), dim):
            return F.softmax(input, dim, _stacklevel + 1, dtype)
    if dim is None:
        return F.softmax(input, dim, _stacklevel + 1, dtype)
    shares: Tensor = torch.ops.nhwc.softmax(input, dim, dtype=dtype)
    return shares


def log_softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: DType | None = None) -> Tensor:
    """Stands in for `torch.nn.functional.log_softmax`, over the channels; other dimensions are PyTorch's.

    Example:
        >>> x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.log_softmax(x, dim=1).stride()
        (128, 1, 32, 8)
    """
    if not is_scripting():
        if is_theirs(input) or not are((int,), dim):
            return F.log_softmax(input, dim, _stacklevel + 1, dtype)
    if dim is None:
        return F.log_softmax(input, dim, _stacklevel + 1, dtype)
    shares: Tensor = torch.ops.nhwc.log_softmax(input, dim, dtype=dtype)
    return shares


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Stands in for `torch.nn.functional.cross_entropy`, for indices and probabilities of classes.

    Example:
        >>> x = torch.zeros(2, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.cross_entropy(x, torch.ones(2, 4, 4, dtype=torch.long))
        tensor(2.0794)
    """
    if not is_scripting():
        is_usual = target is not None and are((int,), ignore_index) and are(NUMBER, label_smoothing)
        if is_theirs(input, target, weight) or not is_usual:
            return F.cross_entropy(
                input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
            )
    if size_average is not None or reduce is not None:
        reduction = _Reduction.legacy_get_string(size_average, reduce)
    how = _Reduction.get_enum(reduction)
    loss: Tensor = torch.ops.nhwc.cross_entropy(input, target, weight, how, ignore_index, label_smoothing)
    return loss


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """Stands in for `torch.nn.functional.gelu`, which is twice as slow on channels-last on a CPU.

    Example:
        >>> x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.gelu(x).stride()
        (128, 1, 32, 8)
    """
    if not is_scripting():
        if is_theirs(input) or not are((str,), approximate):
            return F.gelu(input, approximate=approximate)
    activated: Tensor = torch.ops.nhwc.gelu(input, approximate=approximate)
    return activated
