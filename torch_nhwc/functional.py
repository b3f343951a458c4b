"""Drop-ins for functions of `torch.nn.functional` that lose channels-last, with their signatures and numbers.

A channels-last activation comes out in channels-last, and so does its gradient. Everything else goes to PyTorch's own
function, and so does every call while a compiler traces, which then fuses as usual, except for convolutions. Subclasses
of `torch.Tensor` that compute as it does, such as MONAI's `MetaTensor`, keep their class. TorchScript compiles them,
since the branches that it cannot compile are inside of `if not is_scripting()`.
"""

import math
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, Optional

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._jit_internal import (  # type: ignore[attr-defined]
    BroadcastingList2,
    BroadcastingList3,
    boolean_dispatched,
    is_scripting,
)
from torch.nn.functional import (  # type: ignore[attr-defined]
    _unpool_output_size,
    _verify_batch_size,
    _verify_spatial_size,
)
from torch.nn.modules.utils import _list_with_default, _triple
from torch.overrides import handle_torch_function, has_torch_function

import torch_nhwc.ops  # noqa: F401  registers the operators

if TYPE_CHECKING:
    from torch import dtype as DType  # noqa: N812
else:
    DType = int  # which is a dtype in TorchScript

__all__ = [
    "adaptive_avg_pool3d",
    "adaptive_max_pool3d",
    "avg_pool3d",
    "batch_norm",
    "conv2d",
    "conv3d",
    "conv_transpose2d",
    "conv_transpose3d",
    "cross_entropy",
    "gelu",
    "group_norm",
    "instance_norm",
    "interpolate",
    "linear",
    "log_softmax",
    "max_unpool3d",
    "normalize",
    "pad",
    "pixel_shuffle",
    "pixel_unshuffle",
    "softmax",
]


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str | None = None,
    residual: Tensor | None = None,
    negative_slope: float = 0.01,
) -> Tensor:
    """Stand in for `torch.nn.functional.group_norm`, whose statistics are wrong on channels-last on a CPU.

    As accurate there as on contiguous activations, for any mean.

    Args:
        input: As for PyTorch's function, and so are the next four arguments.
        num_groups: The number of groups.
        weight: One factor for each channel.
        bias: One summand for each channel.
        eps: Added to the variance.
        activation: What follows in the same pass over memory: "relu", "relu6", "leaky_relu", "silu", "gelu" or
            "gelu_tanh".
        residual: A tensor like the input that is added before the activation.
        negative_slope: Of "leaky_relu".

    Raises:
        ValueError: `activation` is none of these.

    Example:
        >>> x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.group_norm(x, num_groups=2, activation="silu").stride()
        (128, 1, 32, 8)
    """
    if activation is None and residual is None:
        return _group_norm(input, num_groups, weight, bias, eps)
    if not is_scripting():
        operands = (input, None, None, weight, bias, num_groups, True, 0.0, eps)
        fused = _in_one_pass(operands, activation, residual, negative_slope)
        if fused is not None:
            return fused
    return _followed(_group_norm(input, num_groups, weight, bias, eps), activation, residual, negative_slope)


def _group_norm(input: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if not is_scripting():
        is_usual = type(num_groups) is int and type(eps) in _NUMBER
        if not is_usual or _is_pytorch_s(input, weight, bias) or input.dim() < 2:
            return _pass_on("group_norm", input, num_groups, weight, bias, eps)
    if num_groups < 1 or input.numel() < 2 * num_groups:  # the only cases that the check may complain of
        _verify_batch_size([input.size(0) * input.size(1) // num_groups, num_groups] + list(input.size()[2:]))
    if not is_scripting():
        return torch.ops.nhwc.group_norm._op(input, num_groups, weight, bias, eps)
    return torch.ops.nhwc.group_norm(input, num_groups, weight, bias, eps)


def instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str | None = None,
    residual: Tensor | None = None,
    negative_slope: float = 0.01,
) -> Tensor:
    """Stand in for `torch.nn.functional.instance_norm`, whose gradient is wrong on channels-last for a batch of 1.

    What follows in the same pass is as for `group_norm`.

    Example:
        >>> x = torch.randn(1, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.instance_norm(x, activation="relu").stride()
        (128, 1, 32, 8)
    """
    options = (use_input_stats, momentum, eps)
    if activation is None and residual is None:
        return _instance_norm(input, running_mean, running_var, weight, bias, *options)
    if not is_scripting():
        if running_mean is None and running_var is None and use_input_stats is True and input.dim() > 3:
            operands = (input, None, None, weight, bias, input.size(1), True, 0.0, eps)
            fused = _in_one_pass(operands, activation, residual, negative_slope)
            if fused is not None:
                return fused
    normed = _instance_norm(input, running_mean, running_var, weight, bias, *options)
    return _followed(normed, activation, residual, negative_slope)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    if not is_scripting():
        is_usual = _are((bool,), use_input_stats) and _are(_NUMBER, momentum, eps)
        tensors = (input, running_mean, running_var, weight, bias)
        if _is_pytorch_s(*tensors) or not is_usual:
            theirs = _pass_on("instance_norm", *tensors, use_input_stats, momentum, eps)
            is_compiled = torch.compiler.is_exporting() or (torch.compiler.is_compiling() and type(theirs) is Tensor)
            return _with_contiguous_gradient(theirs) if is_compiled and theirs.requires_grad else theirs
    if use_input_stats:
        _verify_spatial_size(input.size())
    normed: Tensor = torch.ops.nhwc.instance_norm(
        input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )
    return _with_contiguous_gradient(normed)


def _with_contiguous_gradient(normed: Tensor) -> Tensor:
    """Return the result of PyTorch's instance norm, whose gradient for a batch of 1 is wrong unless it is contiguous.

    A gradient that passes through a flat tensor is.
    """
    if normed.is_contiguous():
        normed = _reshaped(normed.flatten(), normed.size())  # type: ignore[arg-type]
    return normed


def _reshaped(tensor: Tensor, sizes: list[int]) -> Tensor:
    """Return a tensor in another shape, as no view, since an activation in place may follow.

    In a trace it is a view: the tracer makes constants of sizes that are given to an operator of `torch.ops`.
    """
    if not is_scripting():
        if not torch.compiler.is_compiling() and torch._C._is_tracing():
            return tensor.view(sizes)
    return torch.ops.aten._unsafe_view(tensor, sizes)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str | None = None,
    residual: Tensor | None = None,
    negative_slope: float = 0.01,
) -> Tensor:
    """Stand in for `torch.nn.functional.batch_norm`, whose sums over channels-last are inaccurate on a CPU.

    The more rows there are, the larger PyTorch's error is: in training in everything, in evaluation in the gradients of
    weight and bias. Ours is as accurate as PyTorch's on contiguous activations. PyTorch's own kernel stays where there
    are few rows, which are the pixels or voxels of all samples. What follows in the same pass is as for `group_norm`.

    Example:
        >>> x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.batch_norm(x, None, None, training=True, activation="relu").stride()
        (128, 1, 32, 8)
    """
    options = (training, momentum, eps)
    if activation is None and residual is None:
        return _batch_norm(input, running_mean, running_var, weight, bias, *options)
    if not is_scripting():
        operands = (input, running_mean, running_var, weight, bias, 0, *options)
        fused = _in_one_pass(operands, activation, residual, negative_slope)
        if fused is not None:
            return fused
    normed = _batch_norm(input, running_mean, running_var, weight, bias, *options)
    return _followed(normed, activation, residual, negative_slope)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    # Without a gradient PyTorch's is right, and sums nothing.
    if not training and not torch.is_grad_enabled():
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if not is_scripting():
        is_usual = _are((bool,), training) and _are(_NUMBER, momentum, eps)
        tensors = (input, running_mean, running_var, weight, bias)
        if _is_pytorch_s(*tensors) or not is_usual:
            return _pass_on("batch_norm", *tensors, training, momentum, eps)
        # The tracer runs with and without a gradient, and compares.
        if not training and torch._C._is_tracing():
            return F.batch_norm(*tensors, training, momentum, eps)
    if input.dim() < 4 or eps <= 0.0:  # for its errors
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    if training:
        _verify_batch_size(input.size())
    if not is_scripting():
        return torch.ops.nhwc.batch_norm._op(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return torch.ops.nhwc.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _in_one_pass(
    operands: tuple[Any, ...], activation: str | None, residual: Tensor | None, negative_slope: float
) -> Tensor | None:
    """Return a norm and what follows it, or `None` where one pass cannot compute both."""
    input, *_, weight, bias, groups, training, momentum, eps = operands
    name, parameter = {"relu6": ("relu", 6.0), "leaky_relu": ("leaky_relu", negative_slope)}.get(
        activation or "none", (activation or "none", math.inf)
    )
    is_usual = _are(_NUMBER, momentum, eps, negative_slope) and _are((bool,), training) and type(groups) is int
    if name not in _IN_ONE_PASS or not is_usual or _is_pytorch_s(*operands[:5], residual):
        return None
    if _is_tracing() or _are_transforms_active():
        return None
    mean, deviation, waiting = torch.ops.nhwc.norm_waiting._op(*operands, False)
    if waiting is None:
        return None
    return torch.ops.nhwc.norm_activation._op(
        *(input, mean, deviation, weight, bias, residual, groups, training, eps, False, name, parameter)
    )


def _followed(out: Tensor, activation: str | None, residual: Tensor | None, negative_slope: float) -> Tensor:
    """Add a residual, and compute an activation, by PyTorch's functions."""
    if residual is not None:
        out = out + residual
    if activation is None:
        return out
    if activation == "relu":
        return F.relu(out)
    if activation == "relu6":
        return F.relu6(out)
    if activation == "leaky_relu":
        return F.leaky_relu(out, negative_slope)
    if activation == "silu":
        return F.silu(out)
    if activation == "gelu":
        return F.gelu(out)
    if activation == "gelu_tanh":
        return F.gelu(out, approximate="tanh")
    raise ValueError(
        f"torch_nhwc: activation: expected relu, relu6, leaky_relu, silu, gelu or gelu_tanh, got '{activation}'"
    )


def normalize(
    input: Tensor,
    p: float = 2.0,
    dim: int = 1,
    eps: float = 1e-12,
    out: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    scale: float = 1.0,
    activation: str | None = None,
) -> Tensor:
    """Stand in for `torch.nn.functional.normalize` over the channels, which is several passes over memory.

    Ours is one, on channels-last. With a scale that is the root of the number of channels it is the RMS norm of video
    autoencoders. Other norms and dimensions are PyTorch's.

    Args:
        input: As for PyTorch's function, and so are the next four arguments.
        p: The exponent of the norm; ours is for 2.
        dim: The dimension; ours is for 1.
        eps: The least norm that is divided by.
        out: Where the result is written, by PyTorch.
        weight: One factor for each channel, which may have sizes of 1 behind these.
        bias: One summand for each channel, likewise.
        scale: A factor for all channels.
        activation: What follows: "silu" in the same pass, the others of `group_norm` after it.

    Raises:
        ValueError: `activation` is none of these.

    Example:
        >>> x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.normalize(x, weight=torch.ones(8), scale=8**0.5, activation="silu").stride()
        (128, 1, 32, 8)
    """
    name = "none"
    if activation is not None and activation == "silu":
        name = "silu"
    if not is_scripting():
        is_usual = _are(_NUMBER, p, eps, scale) and type(dim) is int
        if not is_usual or _is_pytorch_s(input, weight, bias):
            return _scaled(_pass_on("normalize", input, p, dim, eps, out), weight, bias, scale, activation)
    if p != 2.0 or dim != 1 or out is not None or input.dim() < 4:
        return _scaled(F.normalize(input, p, dim, eps, out), weight, bias, scale, activation)
    normed: Tensor = torch.ops.nhwc.normalize(input, weight, bias, scale, eps, name)
    return normed if name == "silu" else _followed(normed, activation, None, 0.01)


def _scaled(normed: Tensor, weight: Tensor | None, bias: Tensor | None, scale: float, activation: str | None) -> Tensor:
    """Compute what follows a normalisation by PyTorch's functions."""
    if scale != 1.0:
        normed = normed * scale
    if weight is not None:
        normed = normed * weight.reshape([-1] + [1] * (normed.dim() - 2))
    if bias is not None:
        normed = normed + bias.reshape([-1] + [1] * (normed.dim() - 2))
    return _followed(normed, activation, None, 0.01)


def softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: DType | None = None) -> Tensor:
    """Stand in for `torch.nn.functional.softmax` over the channels; other dimensions are PyTorch's.

    Example:
        >>> x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.softmax(x, dim=1).stride()
        (128, 1, 32, 8)
    """
    if not is_scripting():
        if _is_pytorch_s(input) or not _are((int,), dim):
            return _pass_on("softmax", input, dim, _stacklevel + 2, dtype)
    if dim is None:
        return F.softmax(input, dim, _stacklevel + 1, dtype)
    return torch.ops.nhwc.softmax(input, dim, dtype)


def log_softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: DType | None = None) -> Tensor:
    """Stand in for `torch.nn.functional.log_softmax` over the channels; other dimensions are PyTorch's.

    Example:
        >>> x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.log_softmax(x, dim=1).stride()
        (128, 1, 32, 8)
    """
    if not is_scripting():
        if _is_pytorch_s(input) or not _are((int,), dim):
            return _pass_on("log_softmax", input, dim, _stacklevel + 2, dtype)
    if dim is None:
        return F.log_softmax(input, dim, _stacklevel + 1, dtype)
    return torch.ops.nhwc.log_softmax(input, dim, dtype)


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
    """Stand in for `torch.nn.functional.cross_entropy`, for indices and probabilities of classes.

    Example:
        >>> x = torch.zeros(2, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.cross_entropy(x, torch.ones(2, 4, 4, dtype=torch.long))
        tensor(2.0794)
    """
    is_ours = True
    if not is_scripting():
        tensors, options = (input, target, weight), (size_average, ignore_index, reduce, reduction, label_smoothing)
        if target is None or _is_pytorch_s(*tensors):
            return _pass_on("cross_entropy", *tensors, *options)
        is_ours = not torch._C._is_tracing()
    if is_ours and _is_channels_last(input):
        rows = input.movedim(1, -1)
        if not is_scripting() and _are_classes(target, rows) and label_smoothing == 0:
            dtype = torch.float32 if _is_cast_by_autocast(input) else None
            logarithms = torch.ops.nhwc.log_softmax(input, 1, dtype).movedim(1, -1).flatten(0, -2)
            loss = F.nll_loss(logarithms, target.flatten(), weight, size_average, ignore_index, reduce, reduction)
            return _as_pixels(loss, rows)
        is_long = input.stride(-1) >= (32 if input.element_size() == 2 else 16)
        if is_long and (target.shape == input.shape or target.shape == rows.shape[:-1]):
            # One loss for each row of a matrix: PyTorch's softmax over a last dimension is fastest for many channels.
            flat = target.movedim(1, -1).flatten(0, -2) if target.dim() == input.dim() else target.flatten()
            loss = F.cross_entropy(
                rows.flatten(0, -2), flat, weight, size_average, ignore_index, reduce, reduction, label_smoothing
            )
            return _as_pixels(loss, rows)
        input = rows.flatten().view(rows.shape).movedim(-1, 1)  # a gradient through a flat tensor has its order
    return F.cross_entropy(input, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing)


def _as_pixels(loss: Tensor, rows: Tensor) -> Tensor:
    """Return the losses of all rows in the shape of the pixels, as no view; a single loss stays."""
    return loss if loss.dim() == 0 else _reshaped(loss, rows.shape[:-1])  # type: ignore[arg-type]


def _are_classes(target: Tensor, rows: Tensor) -> bool:
    """Return whether each row on a CPU has one class, by its index."""
    return rows.is_cpu and target.shape == rows.shape[:-1] and target.dtype == torch.long


def _is_cast_by_autocast(input: Tensor) -> bool:
    """Return whether autocast computes a loss of half precision in float32 on a CPU."""
    return input.element_size() == 2 and torch.is_autocast_enabled("cpu")


def _is_channels_last(input: Tensor) -> bool:
    """Return whether an image or volume is in channels-last, by strides alone, which every transform gives.

    What is ambiguous counts as contiguous, as in PyTorch, unless it has the canonical strides of channels-last.
    """
    return (input.dim() == 4 or input.dim() == 5) and input.stride(1) == 1 and input.stride(-1) > 1


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """Stand in for `torch.nn.functional.gelu`, which is twice as slow on channels-last on a CPU.

    Example:
        >>> x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.gelu(x).stride()
        (128, 1, 32, 8)
    """
    if not is_scripting():
        if type(approximate) is not str or _is_pytorch_s(input):
            return _pass_on("gelu", input, approximate=approximate)
        return torch.ops.nhwc.gelu._op(input, approximate=approximate)
    return torch.ops.nhwc.gelu(input, approximate=approximate)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Stand in for `torch.nn.functional.linear`, which is slow in half precision where oneDNN does not take the dtype.

    Example:
        >>> x, weight = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(1, 3, dtype=torch.bfloat16)
        >>> torch_nhwc.functional.linear(x, weight).flatten()
        tensor([3., 3.], dtype=torch.bfloat16)
    """
    if not is_scripting():
        is_half = type(weight) in _TENSORS and (weight.dtype in _HALVES or _is_any_autocast_enabled())
        if not is_half or torch.compiler.is_exporting():
            return F.linear(input, weight, bias)
        if not torch.compiler.is_compiling():  # graphs get PyTorch's operators, casts included
            if _is_pytorch_s(input, weight, bias):
                return _pass_on("linear", input, weight, bias)
            return torch.ops.nhwc.linear._op(input, weight, bias)
    return torch.ops.nhwc.linear(input, weight, bias)


def avg_pool3d(
    input: Tensor,
    kernel_size: BroadcastingList3[int],
    stride: Optional[BroadcastingList3[int]] = None,  # noqa: UP045
    padding: BroadcastingList3[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Stand in for `torch.nn.functional.avg_pool3d`, which gives contiguous activations.

    Example:
        >>> x = torch.randn(2, 8, 4, 4, 4).to(memory_format=torch.channels_last_3d)
        >>> torch_nhwc.functional.avg_pool3d(x, 2).stride()
        (64, 1, 32, 16, 8)
    """
    if not is_scripting():
        is_usual = _are_sizes(kernel_size, padding) and (stride is None or _are_sizes(stride))
        is_usual = is_usual and _are((bool,), ceil_mode, count_include_pad) and _are((int, _NONE), divisor_override)
        if _is_pytorch_s(input) or not is_usual:
            options = (ceil_mode, count_include_pad, divisor_override)
            return _pass_on("avg_pool3d", input, kernel_size, stride, padding, *options)
    if stride is None:
        stride = kernel_size
    return torch.ops.nhwc.avg_pool3d(
        input, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override
    )


def adaptive_avg_pool3d(input: Tensor, output_size: BroadcastingList3[int]) -> Tensor:
    """Stand in for `torch.nn.functional.adaptive_avg_pool3d`, which gives contiguous activations.

    Example:
        >>> x = torch.randn(2, 8, 4, 4, 4).to(memory_format=torch.channels_last_3d)
        >>> torch_nhwc.functional.adaptive_avg_pool3d(x, (None, 2, 2)).stride()
        (128, 1, 32, 16, 8)
    """
    if not is_scripting():
        if _is_pytorch_s(input) or not _are_output_sizes(output_size):
            return _pass_on("adaptive_avg_pool3d", input, output_size)
        output_size = _as_many(output_size, 3)
    sizes = _list_with_default(output_size, input.size())  # type: ignore[arg-type]
    return torch.ops.nhwc.adaptive_avg_pool3d(input, sizes)


def adaptive_max_pool3d(
    input: Tensor,
    output_size: BroadcastingList3[int],
    return_indices: bool = False,
) -> Any:
    """Stand in for `torch.nn.functional.adaptive_max_pool3d`, which gives contiguous activations.

    Example:
        >>> x = torch.randn(2, 8, 4, 4, 4).to(memory_format=torch.channels_last_3d)
        >>> pooled, indices = torch_nhwc.functional.adaptive_max_pool3d(x, 2, return_indices=True)
        >>> pooled.stride()
        (64, 1, 32, 16, 8)
    """
    if _is_pytorch_s(input) or not (_are_output_sizes(output_size) and _are((bool,), return_indices)):
        return _pass_on("adaptive_max_pool3d", input, output_size, return_indices)
    both = _max_with_indices(input, _as_many(output_size, 3))
    return both if return_indices else both[0]


def _max_with_indices(
    input: Tensor, output_size: BroadcastingList3[int], return_indices: bool = True
) -> tuple[Tensor, Tensor]:
    sizes = _list_with_default(output_size, input.size())  # type: ignore[arg-type]
    return torch.ops.nhwc.adaptive_max_pool3d(input, sizes)


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


def max_unpool3d(
    input: Tensor,
    indices: Tensor,
    kernel_size: BroadcastingList3[int],
    stride: Optional[BroadcastingList3[int]] = None,  # noqa: UP045
    padding: BroadcastingList3[int] = 0,
    output_size: Optional[BroadcastingList3[int]] = None,  # noqa: UP045
) -> Tensor:
    """Stand in for `torch.nn.functional.max_unpool3d`, which gives contiguous activations.

    Example:
        >>> x = torch.randn(2, 8, 4, 4, 4).to(memory_format=torch.channels_last_3d)
        >>> pooled, indices = torch.nn.functional.max_pool3d(x, 2, return_indices=True)
        >>> torch_nhwc.functional.max_unpool3d(pooled, indices, 2).stride()
        (512, 1, 128, 32, 8)
    """
    if not is_scripting():
        is_usual = _are_sizes(kernel_size, padding) and (stride is None or _are_sizes(stride))
        if _is_pytorch_s(input, indices) or not is_usual:
            return _pass_on("max_unpool3d", input, indices, kernel_size, stride, padding, output_size)
    kernel_size = _triple(kernel_size)
    stride = kernel_size if stride is None else _triple(stride)
    padding = _triple(padding)
    sizes = _unpool_output_size(input, kernel_size, stride, padding, output_size)
    return torch.ops.nhwc.max_unpool3d(input, indices, sizes, stride, padding)


def pad(input: Tensor, pad: list[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Stand in for `torch.nn.functional.pad` in the mode `"circular"`, on a GPU with "reflect" and "replicate".

    Other calls are PyTorch's.

    Example:
        >>> x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.pad(x, (1, 1, 1, 1), mode="circular").stride()
        (288, 1, 48, 8)
    """
    if not is_scripting():
        if _is_pytorch_s(input) or _are((int,), pad) or not _are_sizes(pad, count=2 * input.dim() - 4):
            return _pass_on("pad", input, pad, mode, value)
        if input.is_cuda and mode in _PADDINGS and value is None:
            return torch.ops.nhwc.pad(input, pad, mode)
    if mode != "circular" or value is not None:
        return F.pad(input, pad, mode, value)
    return torch.ops.nhwc.pad_circular(input, pad)


_PADDINGS = ("reflect", "replicate", "circular")
# The modes of interpolation that have a kernel on a GPU, by the rank of the input.
_INTERPOLATIONS = {4: ("nearest", "nearest-exact", "bilinear"), 5: ("nearest", "nearest-exact", "trilinear")}


def interpolate(
    input: Tensor,
    size: Optional[list[int]] = None,  # noqa: UP045
    scale_factor: Optional[list[float]] = None,  # noqa: UP045
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    """Stand in for `torch.nn.functional.interpolate`, which is slow on channels-last on a GPU.

    Ours are the modes "nearest", "nearest-exact", "bilinear" and "trilinear" where our kernels run. Other calls are
    PyTorch's. Gradients are the same in each run. In TorchScript, size and factor are lists.

    Example:
        >>> x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.interpolate(x, scale_factor=2, mode="bilinear").stride()
        (512, 1, 64, 8)
    """
    if not is_scripting():
        options = (size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
        ours = None if _is_pytorch_s(input) or not input.is_cuda else _interpolation(input, *options)
        if ours is None:
            return _pass_on("interpolate", input, *options)
        return torch.ops.nhwc.interpolate(input, *ours)
    return F.interpolate(input, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)


def _interpolation(
    input: Tensor, size: Any, scale_factor: Any, mode: Any, align_corners: Any, recompute: Any, antialias: Any
) -> tuple[Any, ...] | None:
    """Return the arguments of our operator, or `None` for calls that PyTorch computes, or refuses."""
    axes, is_nearest = input.dim() - 2, str(mode).startswith("nearest")
    is_usual = _are((bool, _NONE), align_corners, recompute) and not (is_nearest and align_corners is not None)
    if not is_usual or antialias is not False or _is_tracing() or mode not in _INTERPOLATIONS.get(input.dim(), ()):
        return None
    if not torch.ops.nhwc.runs_cuda_norms(input.device) or (size is None) == (scale_factor is None):
        return None
    if size is not None:
        if recompute or not _are_sizes(size, count=axes):
            return None
        return _as_many(size, axes), None, mode, bool(align_corners)
    factors = _as_many(scale_factor, axes)
    if type(factors) not in _LISTS or len(factors) != axes or not _are(_NUMBER, *factors):
        return None
    if recompute:
        return [int(length * each) for length, each in zip(input.shape[2:], factors)], None, mode, bool(align_corners)
    return None, [float(each) for each in factors], mode, bool(align_corners)


def pixel_shuffle(input: Tensor, upscale_factor: int) -> Tensor:
    """Stand in for `torch.nn.functional.pixel_shuffle`, which raises for channels-last volumes.

    As in PyTorch, the last three dimensions are channels, height and width. In a volume these are the depth, whose
    planes are split, and the plane.

    Example:
        >>> x = torch.randn(2, 8, 4, 3, 3).to(memory_format=torch.channels_last_3d)
        >>> torch_nhwc.functional.pixel_shuffle(x, 2).stride()
        (288, 1, 288, 48, 8)
    """
    factor = upscale_factor
    if not is_scripting():
        if type(factor) is not int or not isinstance(input, Tensor) or _keeps_its_class(input):
            return _pass_on("pixel_shuffle", input, factor)
    if input.dim() != 5 or factor < 1 or input.size(2) % (factor * factor) != 0:
        return F.pixel_shuffle(input, factor)
    depth, height, width = input.size(2) // (factor * factor), input.size(3), input.size(4)
    parts = [depth, factor, factor, height, width]
    return _move_pixels(input, parts, [0, 3, 1, 4, 2], [depth, height * factor, width * factor])


def pixel_unshuffle(input: Tensor, downscale_factor: int) -> Tensor:
    """Stand in for `torch.nn.functional.pixel_unshuffle`, as `pixel_shuffle` for its function.

    Example:
        >>> x = torch.randn(2, 8, 1, 6, 6).to(memory_format=torch.channels_last_3d)
        >>> torch_nhwc.functional.pixel_unshuffle(x, 2).stride()
        (288, 1, 72, 24, 8)
    """
    factor = downscale_factor
    if not is_scripting():
        if type(factor) is not int or not isinstance(input, Tensor) or _keeps_its_class(input):
            return _pass_on("pixel_unshuffle", input, factor)
    is_volume = input.dim() == 5 and input.numel() > 0
    if not is_volume or factor < 1 or input.size(3) % factor != 0 or input.size(4) % factor != 0:
        return F.pixel_unshuffle(input, factor)
    depth, height, width = input.size(2), input.size(3) // factor, input.size(4) // factor
    parts = [depth, height, factor, width, factor]
    return _move_pixels(input, parts, [0, 2, 4, 1, 3], [depth * factor * factor, height, width])


def _move_pixels(input: Tensor, parts: list[int], order: list[int], merged: list[int]) -> Tensor:
    """Split depth, height and width of a volume into parts, put these in order, and merge them to three again."""
    samples, channels = [input.size(0)], [input.size(1)]
    is_last = _is_channels_last(input)
    rows = input.permute(0, 2, 3, 4, 1) if is_last else input
    before = samples if is_last else samples + channels
    after = channels if is_last else channels[:0]
    count = len(before)
    around = [count + at for at in order]
    dims = [at for at in range(count)] + around + [count + len(parts) + at for at in range(len(after))]
    moved = rows.reshape(before + parts + after).permute(dims).clone(memory_format=torch.contiguous_format)
    result = _reshaped(moved, before + merged + after)
    return _reshaped(result.permute(0, 4, 1, 2, 3), samples + channels + merged) if is_last else result


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: BroadcastingList2[int] = 1,
    padding: BroadcastingList2[int] = 0,
    dilation: BroadcastingList2[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Stand in for `torch.nn.functional.conv2d`, which computes some shapes wrong on a CPU, without an error.

    These are weight gradients where every position of the kernel has a tap in the padding, weight gradients of strided
    kernels of one tap, and outputs of one column from filters of one channel.

    Example:
        >>> x = torch.randn(2, 8, 2, 2).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.conv2d(x, torch.randn(3, 8, 5, 5), padding=2).stride()
        (12, 1, 6, 3)
    """
    if not is_scripting():
        return convolve("conv2d", 2, input, weight, bias, (stride, padding, dilation, groups))
    return torch.ops.nhwc.conv2d(input, weight, bias, stride, padding, dilation, groups)


def conv3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: BroadcastingList3[int] = 1,
    padding: BroadcastingList3[int] = 0,
    dilation: BroadcastingList3[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Stand in for `torch.nn.functional.conv3d`, which computes some shapes wrong on a CPU, as `conv2d` does.

    PyTorch's is also many times slower on channels-last for kernels of one tap, and loses the format of a single sample
    in float32.

    Example:
        >>> x = torch.randn(2, 8, 4, 4, 4).to(memory_format=torch.channels_last_3d)
        >>> torch_nhwc.functional.conv3d(x, torch.randn(3, 8, 1, 1, 1), padding="valid").stride()
        (192, 1, 48, 12, 3)
    """
    if not is_scripting():
        return convolve("conv3d", 3, input, weight, bias, (stride, padding, dilation, groups))
    return torch.ops.nhwc.conv3d(input, weight, bias, stride, padding, dilation, groups)


def conv_transpose2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: BroadcastingList2[int] = 1,
    padding: BroadcastingList2[int] = 0,
    output_padding: BroadcastingList2[int] = 0,
    groups: int = 1,
    dilation: BroadcastingList2[int] = 1,
) -> Tensor:
    """Stand in for `torch.nn.functional.conv_transpose2d`, whose gradients are wrong for some shapes on a CPU.

    Example:
        >>> x = torch.randn(2, 8, 2, 2).to(memory_format=torch.channels_last)
        >>> torch_nhwc.functional.conv_transpose2d(x, torch.randn(8, 3, 5, 5), padding=2).stride()
        (12, 1, 6, 3)
    """
    if not is_scripting():
        options = (stride, padding, output_padding, groups, dilation)
        return convolve("conv_transpose2d", 2, input, weight, bias, options)
    return torch.ops.nhwc.conv_transpose2d(input, weight, bias, stride, padding, output_padding, groups, dilation)


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: BroadcastingList3[int] = 1,
    padding: BroadcastingList3[int] = 0,
    output_padding: BroadcastingList3[int] = 0,
    groups: int = 1,
    dilation: BroadcastingList3[int] = 1,
) -> Tensor:
    """Stand in for `torch.nn.functional.conv_transpose3d`, whose gradients are wrong for some shapes on a CPU.

    PyTorch's also loses the format of a single sample in float32.

    Example:
        >>> x = torch.randn(1, 8, 2, 2, 2).to(memory_format=torch.channels_last_3d)
        >>> torch_nhwc.functional.conv_transpose3d(x, torch.randn(8, 3, 2, 2, 2), stride=2).stride()
        (192, 1, 48, 12, 3)
    """
    if not is_scripting():
        options = (stride, padding, output_padding, groups, dilation)
        return convolve("conv_transpose3d", 3, input, weight, bias, options)
    return torch.ops.nhwc.conv_transpose3d(input, weight, bias, stride, padding, output_padding, groups, dilation)


def convolve(name: str, axes: int, input: Any, weight: Any, bias: Any, options: tuple[Any, ...]) -> Tensor:
    """Call PyTorch's function of a name where it is right, fast and in format, by the table of ways, or our operator.

    The options are the other arguments, in PyTorch's order. The answer is remembered, which saves the call of the
    operator. While a compiler traces, the graph gets PyTorch's operators, and ours where our kernels compute.
    """
    if type(input) not in _TENSORS or type(weight) not in _TENSORS or type(bias) not in _PLAIN:
        if not (isinstance(input, Tensor) and isinstance(weight, Tensor)) or not _are_plain_inside(
            (input, weight, bias)
        ):
            return _pass_on(name, input, weight, bias, *options)
    if input.is_cuda and not (axes == 3 and weight.shape[1] == 1):  # there only depthwise volumes are ours
        return getattr(F, name)(input, weight, bias, *options)
    ours: tuple[Any, ...] | None  # the options for our operator, or None for PyTorch's function
    if torch.compiler.is_compiling():
        if _is_pytorch_s_compiled(axes, input, weight, bias, options):
            return getattr(F, name)(input, weight, bias, *options)
        return torch.ops.nhwc.compiled_convolution(input, weight, bias, *_in_one_order(options, axes))
    if _is_tracing():  # for inputs of other sizes, too
        ours = None if torch.onnx.is_in_onnx_export() else _as_lists(options, axes)
    elif _are_transforms_active():  # which may need a gradient that does not show
        ours = _as_lists(options, axes) if _are_usual(options, axes) else None
    else:
        try:
            # All that the answer depends on. The precision of products decides only between ways of our operator.
            call = (
                (input.shape, input.stride(), input.dtype, input.is_cpu, weight.shape, weight.stride(), weight.dtype),
                None if bias is None else bias.dtype,
                (weight.requires_grad, input.requires_grad) if _is_grad_enabled() else None,
                torch.get_autocast_dtype("cpu") if _is_any_autocast_enabled() and _is_autocast_enabled("cpu") else None,
                (_is_onednn_enabled(), _get_num_threads()),
                (name, options),
            )
            ours = _options_of_ours.get(call, _UNKNOWN)
        except (TypeError, RuntimeError):
            if list in map(type, options):  # which have no hash
                options = tuple([tuple(each) if type(each) is list else each for each in options])
                return convolve(name, axes, input, weight, bias, options)
            # Symbols, which have no hash; tensors without strides, which are PyTorch's.
            is_strided = all(each.layout == torch.strided and not each.is_nested for each in (input, weight))
            ours = _as_lists(options, axes) if is_strided and _are_usual(options, axes) else None
        else:
            if ours is _UNKNOWN:
                if len(_options_of_ours) >= 4096:
                    _options_of_ours.clear()
                is_ours = _way_of(axes, input, weight, bias, options)[0] != "pytorch"
                # The operator requests huge pages for a large output, whoever computes it.
                is_large = input.is_cpu and input.numel() * input.element_size() >= _LARGE  # sparse ones have no nbytes
                is_ours |= is_large and _are_usual(options, axes)
                # To find an operator for a padding by name takes 50 us.
                known = in_numbers(weight, *options) if is_ours and type(options[1]) is str else None
                ours = _options_of_ours[call] = _as_lists(known or options, axes) if is_ours else None
    if ours is None:
        return getattr(F, name)(input, weight, bias, *options)
    return getattr(torch.ops.nhwc, name)._op(input, weight, bias, *ours)


# What is called in each forward, without looking for it.
_is_tracing = torch._C._is_tracing
_are_transforms_active = torch._C._are_functorch_transforms_active
_is_grad_enabled, _is_autocast_enabled = torch.is_grad_enabled, torch.is_autocast_enabled
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_is_onednn_enabled, _get_num_threads = torch._C._get_mkldnn_enabled, torch.get_num_threads
_UNKNOWN: Any = object()
# The options of calls for our operator, or `None` for those that go PyTorch's way.
_options_of_ours: dict[Any, tuple[Any, ...] | None] = {}
_LARGE = 1 << 20  # bytes of an input, of which the operator's call is no part of the time
_GROUPS = 3  # the position of the groups among the options


def _way_of(axes: int, input: Any, weight: Any, bias: Any, options: tuple[Any, ...]) -> tuple[str, str, bool]:
    """Return what the table of ways says. Options of types that the operators do not take are for PyTorch."""
    if not _are_usual(options, axes):
        return "pytorch", "pytorchs", False
    answer = torch.ops.nhwc.convolution_way(input, weight, bias, *_in_one_order(options, axes))
    return answer[0], answer[1], answer[2]


def _is_pytorch_s_compiled(axes: int, input: Any, weight: Any, bias: Any, options: tuple[Any, ...]) -> bool:
    """Return the same while a compiler traces. Where sizes may vary, the operator is called, which adds guards."""
    if torch.compiler.is_exporting():
        return True
    from torch.fx.experimental.symbolic_shapes import has_static_value  # loads sympy

    if input.device.type != "cpu" or not all(has_static_value(size) for size in (*input.shape, *weight.shape)):
        return not _are_usual(options, axes)
    tensors = [(tuple(each.shape), each.stride(), each.dtype) for each in (input, weight, bias) if each is not None]
    requires_grad = torch.is_grad_enabled() and (input.requires_grad, weight.requires_grad)
    return not _is_in_graphs(axes, tensors, requires_grad, options)


def _is_in_graphs(axes: int, tensors: Any, requires_grad: Any, options: tuple[Any, ...]) -> bool:
    """Return whether compiled graphs go the way of tensors of these shapes, strides and dtypes."""
    input, weight, *bias = (torch.empty_strided(shape, strides, dtype=dtype) for shape, strides, dtype in tensors)
    with torch.set_grad_enabled(bool(requires_grad)):
        if requires_grad:
            input.requires_grad_(requires_grad[0]), weight.requires_grad_(requires_grad[1])
        return _way_of(axes, input, weight, bias[0] if bias else None, options)[2]


_is_in_graphs._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.compiler's decorator loads the compiler


def in_numbers(weight: Tensor, stride: Any, padding: Any, dilation: Any, groups: int) -> tuple[Any, ...] | None:
    """Return the options of a convolution with numbers for a padding by name; `None` where it is one more at an end."""
    if not all(type(each) is tuple and len(each) == weight.dim() - 2 for each in (stride, dilation)):
        return None
    if padding in ("same", "valid"):
        both = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, weight.shape[2:])]
        if any(each % 2 for each in both) or (padding == "same" and any(each != 1 for each in stride)):
            return None
        padding = tuple([each // 2 for each in both])
    is_usual = type(padding) is tuple and len(padding) == len(stride)
    return (stride, padding, dilation, groups) if is_usual else None


def _are_usual(options: tuple[Any, ...], axes: int) -> bool:
    """Return whether a convolution's options have types that the operators take."""
    sizes = [each for index, each in enumerate(options) if index != _GROUPS]
    if type(sizes[1]) is str and len(options) == 4:  # a padding by name; transposed ones have none
        sizes.pop(1)
    return type(options[_GROUPS]) is int and _are_sizes(*sizes, count=axes)


def _in_one_order(options: tuple[Any, ...], axes: int) -> tuple[Any, ...]:
    """Return a convolution's options as lists, the output's padding last, which PyTorch has before the dilation."""
    stride, padding, dilation, groups, *others = _as_lists(options, axes)
    return (stride, padding, others[0], groups, dilation) if others else (stride, padding, dilation, groups)


def _as_lists(options: tuple[Any, ...], axes: int) -> tuple[Any, ...]:
    """Return a convolution's options with a list for each single number, except for the groups."""
    return tuple([[each] * axes if type(each) is int and at != _GROUPS else each for at, each in enumerate(options)])


_IN_ONE_PASS = ("none", "relu", "leaky_relu", "silu", "gelu", "gelu_tanh")
_LISTS = (tuple, list, torch.Size)
_NONE = type(None)
_NUMBER = (int, float)
_PLAIN = frozenset((Tensor, nn.Parameter, _NONE))
_TENSORS = frozenset((Tensor, nn.Parameter))
_HALVES = frozenset((torch.bfloat16, torch.float16))


def _is_plain(kind: type) -> bool:
    """Return whether operators take tensors of a class, or `None`, as they take plain tensors.

    Subclasses with a `__torch_dispatch__` of their own and proxies of `torch.fx` interpret a call themselves. Others,
    such as MONAI's `MetaTensor`, compute as their base does, and add something in `__torch_function__`.
    """
    return kind in _PLAIN or (issubclass(kind, Tensor) and kind.__torch_dispatch__ is Tensor.__torch_dispatch__)


def is_exported() -> bool:
    """Return whether a compiler or ONNX traces, which get PyTorch's own functions."""
    return torch.compiler.is_compiling() or (torch._C._is_tracing() and torch.onnx.is_in_onnx_export())


def _is_pytorch_s(input: Any, *others: Any) -> bool:
    """Return whether a call is not ours: with a tensor subclass or a proxy, or while a compiler or ONNX traces."""
    if input is None or is_exported():
        return True
    tensors = input, *others
    return not (_PLAIN.issuperset(map(type, tensors)) or _are_plain_inside(tensors))


def _keeps_its_class(tensor: Tensor) -> bool:
    """Return whether a tensor is of a plain subclass whose `__torch_function__` the call has not passed yet."""
    return type(tensor) not in _TENSORS and _is_plain(type(tensor)) and has_torch_function((tensor,))


def _are_plain_inside(tensors: tuple[Any, ...]) -> bool:
    """Return whether a call with plain subclasses has passed their `__torch_function__`, or they have none."""
    return all(_is_plain(type(each)) for each in tensors) and not has_torch_function(tensors)


def _pass_on(name: str, *arguments: Any, **options: Any) -> Tensor:
    """Call PyTorch's function of a name; with plain subclasses ours again, through their `__torch_function__`.

    As with PyTorch's own functions, that is called once for a function, and gives the result its class.
    """
    if not torch.compiler.is_compiling():
        tensors = tuple(each for each in arguments if isinstance(each, Tensor))
        is_plain = all(_is_plain(type(each)) for each in tensors) and not _TENSORS.issuperset(map(type, tensors))
        if is_plain and has_torch_function(tensors):
            return handle_torch_function(keeping_class(name), tensors, *arguments, **options)
    return getattr(F, name)(*arguments, **options)


@lru_cache(maxsize=64)
def keeping_class(name: str) -> Any:
    """Return our function of a name, whose result has the class of its first argument.

    PyTorch's `__torch_function__` would give the class to a view, and the backward of an in-place activation copies the
    gradients of views to contiguous.
    """
    function = globals()[name]

    @wraps(function)
    def call(input: Any, *arguments: Any, **options: Any) -> Any:
        result = function(input, *arguments, **options)
        if type(result) is Tensor and not result._is_view():
            result.__class__ = type(input)
        return result

    return call


def _are(kinds: tuple[type, ...], *values: Any) -> bool:
    """Return whether values have exactly these types; PyTorch takes, traces or refuses all others by its own rules."""
    for value in values:  # noqa: SIM110  a generator takes a microsecond more
        if type(value) not in kinds:
            return False
    return True


def _are_sizes(*values: Any, kinds: tuple[type, ...] = (int,), count: int = 3) -> bool:
    """Return whether each value is one plain number, or a list of some."""
    return all(
        type(value) is int or (type(value) in _LISTS and len(value) == count and _are(kinds, *value))
        for value in values
    )


def _are_output_sizes(output_size: Any) -> bool:
    """Return whether a pool can take these sizes; `torch.jit.trace` takes none that come from the input, for `None`."""
    return _are_sizes(output_size, kinds=(int,) if torch._C._is_tracing() else (int, _NONE))


def _as_many(value: Any, count: int) -> Any:
    """Return one number as a list: the operators take no single one where a size may be symbolic."""
    return [value] * count if isinstance(value, _NUMBER) else value
