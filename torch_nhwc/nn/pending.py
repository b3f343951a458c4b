"""Results of norms and convolutions that wait for the activation after them, so that one pass computes both.

A replaced norm returns a `Pending`: a tensor with the sizes, dtype, device and derivative of its result, and no memory.
PyTorch's functions ask it before they read it, by `__torch_function__`. An activation then computes norm and activation
in one pass, and so does a sum of a residual and the activation after it. Where nothing is derived, a convolution waits
as well, and becomes one with a batch norm in evaluation mode. On a GPU, where PyTorch adds the bias of a convolution in
a pass of its own, the sum waits: most norms take the convolution's result without it. Anything else makes the tensor
compute its layer, once: from then on it is a plain tensor. Nothing is guessed, so what a model does with a result
changes no number. A layer whose results were read by something else twice waits no more; nor does one whose results
nothing read, as it seems: code in C++ that does not ask met a tensor without memory.

The result of an activation waits for zeros around it, though it is known: a convolution that reads those has them as
its padding, and nothing is copied.
"""

import math
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._jit_internal import is_scripting

from torch_nhwc import functional
from torch_nhwc.layout import CHANNELS_LAST
from torch_nhwc.nn.class_swap import Swap

# Elements: with fewer, the wait takes as long as it saves. A step saves more than a call, and group norm at once finds
# its input in the caches. On a GPU launches cost more, less so where casts are saved, too (H200).
_FEWEST, _FEWEST_IN_A_CALL, _FEWEST_IN_GROUPS = 1 << 15, 70_000, 1 << 18
_FEWEST_ON_CUDA, _FEWEST_CAST = 1 << 25, 1 << 21
_FEWEST_INPUTS = 1 << 13  # of a convolution; its own rule is for the results
_MOST_EARLY_READS = 2
_PADDING = "padding"
_is_on = os.environ.get("TORCH_NHWC_PENDING") != "0"


class AtOnce(Swap):
    """A layer whose results never wait."""

    prefix = "AtOnce"
    order = 2

    @classmethod
    def mixin_for(cls, layer_type: type) -> type:
        """Return this class, which serves all layers."""
        return cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        before, _local.is_at_once = _local.is_at_once, True
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            _local.is_at_once = before


class _Local(threading.local):
    is_at_once = False  # whether a layer is called whose results never wait
    is_padding_apart = False  # whether a convolution was called that leaves its padding to others, as it seems


_local = _Local()


class Pending(Tensor):
    """The result of a norm that is not computed yet; as soon as something has read it, its class is `Tensor`."""

    waiting: "Waiting | None"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute what is read, alone or together with the activation that reads it."""
        kwargs = kwargs or {}
        if func in _WITHOUT_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        reader = _READERS.get(func)
        if reader is not None and not _is_observed():
            result = reader(*args, **kwargs)
            if result is not None:
                return result
        _compute_among(args)
        _compute_among(kwargs.values())
        return func(*args, **kwargs)


class Waiting:
    """A call of a norm, and the residual that was added to its result."""

    __slots__ = ("grad_mode", "is_taken", "norm", "operands", "options", "owner", "read", "residual", "stream")
    takes_more = True  # an activation, or a sum
    activations = frozenset(("relu", "leaky_relu", "silu", "gelu", "gelu_tanh"))

    def __init__(self, owner: Any, operands: tuple[Any, ...], options: tuple[Any, ...], read: Any = ()) -> None:
        self.owner = owner
        self.operands = operands
        """Input, mean, reciprocal deviation, weight, bias, and a convolution's bias that is added to the input."""
        self.options = options
        """Groups, whether the statistics are the input's, what is added to the variance, and whether the result is
        float."""
        self.residual: Tensor | None = None
        self.is_taken = False
        """Whether it was computed, or is a part of another one."""
        self.norm: Any = None
        """The layer of the norm that a convolution became one with."""
        self.grad_mode = torch.is_grad_enabled()
        self.stream = torch.cuda.current_stream(operands[0].device) if operands[0].is_cuda else None
        self.read: list[tuple[Tensor, int]] = [*read]
        """What is read, and how often it had changed at the calls of the layers."""
        known = [each for each, _ in self.read]
        for each in self.operands:
            if each is not None and not each.is_inference() and not any(each is other for other in known):
                self.read.append((each, each._version))

    def __del__(self) -> None:
        if self.takes_more and not self.is_taken:
            _count_early_read(self.owner, self._reader)

    @property
    def gains(self) -> bool:
        """Whether several layers are computed at once, even without an activation."""
        return False

    def read_early(self, result: Tensor) -> None:
        """Compute the layer for something that is no activation."""
        if not self.gains or _is_traced_by_dynamo():
            for owner in (self.owner, self.norm):
                if owner is not None:
                    _count_early_read(owner, self._reader)
        with torch.set_grad_enabled(self.grad_mode):
            _become(result, self.compute())

    @property
    def _reader(self) -> Any:
        """What the result waits for: an activation in a grad mode, or padding."""
        return self.grad_mode

    def check_unchanged(self) -> None:
        """Raise an error if something that is read was changed since the calls of the layers."""
        if any(each._version != version for each, version in self.read):
            raise RuntimeError(
                f"torch_nhwc: what a {type(self.owner).__name__} reads was changed in place before its result was "
                "read. The result waits for the activation after it, so that both are computed in one pass: convert "
                "with preserve='at_once', or set the environment variable TORCH_NHWC_PENDING=0"
            )

    def compute(self, activation: str = "none", parameter: float = 0.0, slope: Tensor | None = None) -> Tensor:
        """Return the norm, with the residual and the activation, in one pass.

        A slope is the parameter of PReLU: one number, or one for each channel.
        """
        self.check_unchanged()
        self.is_taken = True
        if self.stream is None or self.stream == (current := torch.cuda.current_stream(self.stream.device)):
            return self._computed(activation, parameter, slope)
        # The memory of what is read may be given to something else as soon as the norm's own stream is done.
        with torch.cuda.stream(self.stream):
            value = self._computed(activation, parameter, slope)
        current.wait_stream(self.stream)
        value.record_stream(current)
        return value

    def _computed(self, activation: str, parameter: float, slope: Tensor | None) -> Tensor:
        # Everything below autograd's own state is as it was, since operators of ours have no rule of autocast.
        *operands, input_bias = self.operands
        return torch.ops.nhwc.norm_activation._op(
            *operands, self.residual, *self.options, activation, parameter, slope, input_bias
        )

    def with_residual(self, result: Tensor, residual: Tensor) -> Tensor | None:
        """Return a tensor for the sum, or `None` where it is to be computed at once."""
        *operands, input_bias = self.operands
        return torch.ops.nhwc.norm_waiting_sum._op(*operands, residual, *self.options, input_bias)


class Known(Waiting):
    """What an activation has computed, in memory as usual, which may still get zeros around it."""

    __slots__ = ("is_bounded", "padded")
    takes_more = False

    def __init__(self, owner: Any, is_bounded: bool, padded: Tensor | None = None) -> None:
        self.owner = owner
        self.is_bounded = is_bounded
        """Whether no sum that overflows shows in it, as after ReLU6."""
        self.padded = None if padded is None else weakref.ref(padded)
        """What has zeros around it, which a reader may change the value under."""

    def read_early(self, result: Tensor) -> None:
        """Give it to something that does not pad."""
        _as_plain(result)
        if self.padded is None:
            _count_early_read(self.owner, _PADDING)
        else:
            _compute_among((self.padded(),))


class Padded(Waiting):
    """A tensor with zeros around it, which wait for a convolution that has them as its padding."""

    __slots__ = ("is_bounded",)
    takes_more = False
    # Operands: the tensor. Options: the numbers of `torch.nn.functional.pad`, two for each axis from the last one.
    _reader = _PADDING
    is_bounded: bool

    def check_unchanged(self) -> None:
        (source,) = self.operands
        if type(source) is Pending:
            _as_plain(source)
        super().check_unchanged()

    def _computed(self, activation: str, parameter: float, slope: Tensor | None) -> Tensor:
        return _with_versions(F.pad, self.operands[0], self.options)


class WaitingNormalization(Waiting):
    """A call of a normalisation of channels by their length."""

    __slots__ = ()
    activations = frozenset(("silu",))
    # Operands: input, weight, bias, and a convolution's bias. Options: scale, and the least length.

    def _computed(self, activation: str, parameter: float, slope: Tensor | None) -> Tensor:
        *operands, input_bias = self.operands
        return torch.ops.nhwc.normalize._op(*operands, *self.options, activation, input_bias)

    def with_residual(self, result: Tensor, residual: Tensor) -> Tensor | None:
        return None


class WaitingConvolution(Waiting):
    """A call of a convolution, the batch norm in evaluation mode after it, and a residual."""

    __slots__ = ()
    # Operands: input, weight and bias; of the norm: running mean and variance, weight and bias.
    # Options: stride, padding, dilation and groups, and what is added to the variance.

    @property
    def gains(self) -> bool:
        return self.operands[3] is not None or self.residual is not None

    def _computed(self, activation: str, parameter: float, slope: Tensor | None) -> Tensor:
        if slope is not None:
            if slope.numel() > 1:
                return torch.prelu(self._computed("none", 0.0, None), slope)
            parameter = slope.item()
        is_finite = all(map(_is_known_finite, (self.operands[0], self.residual)))
        operands = (*self.operands, self.residual, *self.options, is_finite, activation, parameter)
        value: Tensor
        value, is_finite = torch.ops.nhwc.convolution_activation._op(*operands)
        if is_finite:
            _remember_finite(value)
        return value

    def with_residual(self, result: Tensor, residual: Tensor) -> Tensor | None:
        return _waiting_like(result) if _are_alike(residual, result) else None


class WaitingBias(Waiting):
    """A call of a convolution on a GPU, and the sum with its bias."""

    __slots__ = ()
    # Operands: the result without the bias, and a copy of the bias: what shards or moves a model frees the bias's own
    # memory as soon as its layer has been called. Nothing changes them.

    @property
    def activations(self) -> frozenset[str]:  # type: ignore[override]
        # A derivative would keep the convolution's result beside that of the activation.
        return frozenset() if self.grad_mode else Waiting.activations

    @property
    def gains(self) -> bool:
        return self.residual is not None

    def _computed(self, activation: str, parameter: float, slope: Tensor | None) -> Tensor:
        result, bias = self.operands
        if activation == "none" and self.residual is None:
            return _with_versions(torch.add, result, _beside(bias, result))
        return torch.ops.nhwc.bias_activation._op(result, bias, self.residual, activation, parameter, slope)

    def with_residual(self, result: Tensor, residual: Tensor) -> Tensor | None:
        return _waiting_like(result) if not self.grad_mode and _are_alike(residual, result) else None

    def taken_by(self, norm: Callable[..., Tensor | None], owner: Any, *options: Any) -> Tensor | None:
        """Return what a norm makes of the result and the bias, or `None` where they are to be added first."""
        normed = norm(owner, *self.operands, *options)
        self.is_taken |= normed is not None
        return normed


def convolution(
    owner: Any, name: str, axes: int, input: Tensor, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...]
) -> Tensor:
    """Call `functional.conv2d` or `conv3d`, or return a result that waits, where nothing is derived.

    The options are stride, padding, dilation and groups. The owner is the layer, of which is counted how often
    something else than a norm or an activation reads its results.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return functional.convolve(name, axes, input, weight, bias, options)
    # A kernel that overlaps, and has no padding of its own, is one whose input is padded before, perhaps.
    if options[1] in _NO_PADDING and type(options[0]) is tuple and weight.shape[-1] > options[0][-1]:
        _local.is_padding_apart = True
    own = weight
    padded = input.waiting if type(input) is Pending else None
    if type(padded) is Padded:
        input, weight, options = _unpadded(padded, input, axes, weight, options)
    if bias is not None and _adds_bias_apart(input):
        return _convolution_and_bias(owner, name, axes, input, weight, bias, options)
    is_large = type(input) is Pending or (type(input) is Tensor and input.numel() >= _FEWEST_INPUTS)
    if is_large and not torch.is_grad_enabled() and _may_wait() and not torch.is_autocast_enabled("cpu"):
        waiting = _waiting_convolution(owner, own, input, weight, bias, options)
        if waiting is not None:
            return waiting
        return _with_versions(functional.convolve, name, axes, input, weight, bias, options)
    return functional.convolve(name, axes, input, weight, bias, options)


def _adds_bias_apart(input: Tensor) -> bool:
    return input.is_cuda


def _convolution_and_bias(
    owner: Any, name: str, axes: int, input: Any, weight: Tensor, bias: Tensor, options: tuple[Any, ...]
) -> Tensor:
    """Call a convolution whose bias waits, or is added at once."""
    _compute_among((input,))
    is_usual = type(input) is Tensor and type(weight) in _PLAIN and type(bias) in _PLAIN and input.dim() == axes + 2
    is_usual = is_usual and bias.shape == weight.shape[:1] and bias.dtype == weight.dtype  # otherwise PyTorch's error
    if (
        not is_usual
        or _elements_of(input, weight, options[0]) < _FEWEST_ON_CUDA
        or not _may_wait()
        or _is_read_early(owner)
        or _is_observed()
    ):
        return functional.convolve(name, axes, input, weight, bias, options)
    result = _with_versions(functional.convolve, name, axes, input, weight, None, options)
    summand = _with_versions(torch.clone, bias)
    waiting = torch.ops.nhwc.bias_waiting._op(result, summand)
    if waiting is None:
        return result.add_(_beside(bias, result))
    return _as_pending(waiting, WaitingBias(owner, (result, summand), ()))


def _elements_of(input: Tensor, weight: Tensor, stride: Any) -> int:
    """Return about how many elements a convolution's result has."""
    strides = stride if isinstance(stride, list | tuple) else (stride,) * (input.dim() - 2)
    return input.numel() * weight.shape[0] // max(1, input.shape[1] * math.prod(strides))


def _beside(bias: Tensor, result: Tensor) -> Tensor:
    """Return a bias beside the channels of a result, as PyTorch adds it."""
    return bias.to(result.dtype).view(-1, *[1] * (result.dim() - 2))


def _waiting_convolution(
    owner: Any, own: Tensor, input: Any, weight: Tensor, bias: Tensor | None, options: tuple[Any, ...]
) -> Tensor | None:
    """Return a result that waits, of a weight that may be the layer's own one with taps around it."""
    if type(input) is Pending:
        _compute_among((input,))
    if type(input) is not Tensor or type(weight) not in _PLAIN or type(bias) not in _PLAIN or own.is_inference():
        return None
    if _refused.get(id(owner)) == input.shape or _is_read_early(owner):
        return None
    known = functional.in_numbers(weight, *options)
    if known is None or _is_observed():
        return None
    result = torch.ops.nhwc.convolution_waiting._op(input, weight, bias, *known)
    if result is None:
        if not torch.ops.nhwc.records_inputs._op():  # then nothing waits, for the time being
            _remember(_refused, id(owner), owner, input.shape)
        return None
    read = () if weight is own else ((own, own._version),)
    operands = (input, weight, bias, None, None, None, None)
    return _as_pending(result, WaitingConvolution(owner, operands, (*known, 0.0), read))


def _unpadded(
    waiting: Padded, input: Any, axes: int, weight: Tensor, options: tuple[Any, ...]
) -> tuple[Any, Tensor, tuple[Any, ...]]:
    """Return the tensor that was padded, and a convolution's weight and options with the zeros around it.

    With taps that are zero, the kernel of a depthwise convolution reaches as far on the other side. Where nothing is
    derived, and all numbers are finite, that takes less time than padding. After ReLU6 they are known to be finite;
    otherwise their sum shows it.
    """
    known = functional.in_numbers(weight, *options)
    low, high = waiting.options[-2::-2], waiting.options[:0:-2]  # from the first axis on
    if known is None or len(low) > axes or waiting.grad_mode != torch.is_grad_enabled():
        return input, weight, options
    (source,), (stride, padding, dilation, groups) = waiting.operands, known
    waiting.check_unchanged()
    is_finite = _is_known_finite(source)
    both = tuple(map(min, zip(low, high)))
    if low != high:
        is_depthwise = groups > 1 and weight.shape[1] == 1 and source.is_cpu
        has_zero_taps = is_depthwise and dilation == (1,) * axes and not torch.is_grad_enabled()
        if has_zero_taps and not (is_finite and waiting.is_bounded):
            has_zero_taps = is_finite = math.isfinite(source.sum())
        if has_zero_taps:
            more = [after - before for before, after in zip(low[::-1], high[::-1])]
            weight = _with_versions(F.pad, weight, [max(0, each) for one in more for each in (one, -one)])
            both = tuple(map(max, zip(low, high)))
        else:
            if any(both):  # a copy with the rest of the zeros
                rest = [each - even for sides, even in zip(zip(low, high), both) for each in reversed(sides)]
                source = _with_versions(F.pad, source, rest[::-1])
            else:
                source = _become(input, waiting.compute())
            if is_finite:
                _remember_finite(source)
    around = (0,) * (axes - len(low)) + both
    return source, weight, (stride, tuple(map(sum, zip(padding, around))), dilation, groups)


def _with_versions(function: Any, *args: Any) -> Any:
    """Call a function, whose result has a version in inference mode, too: what waits asks for it."""
    if not torch.is_inference_mode_enabled():
        return function(*args)
    with torch.inference_mode(False), torch.no_grad():
        return function(*args)


def _as_pending(result: Any, waiting: Waiting) -> Tensor:
    result.__class__ = Pending
    result.waiting = waiting
    return result


def is_small(input: Tensor) -> bool:
    """Return whether a norm's result has too few elements to wait."""
    return type(input) is Tensor and not torch.compiler.is_compiling() and input.numel() < _FEWEST


def never_waits(input: Tensor) -> bool:
    """Return whether nothing is derived, and a layer's result is to be computed at once."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._is_tracing():
        return False
    return (type(input) is Tensor and input.numel() < _FEWEST_IN_A_CALL) or not _may_wait()


def pending_norm(
    owner: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    training: bool,
    momentum: float,
    eps: float,
    casts: bool = False,
) -> Tensor | None:
    """Return a result that waits, or `None` where the norm is to be computed at once. Batch norm has 0 groups.

    Autocast on a GPU `casts` the input of group norm to float32, and of no other norm.

    The statistics are those of this call, which updates the running ones. What PyTorch refuses does not wait. The owner
    is the norm's layer or weight, of which is counted how often something else reads its results.
    """
    if torch.compiler.is_compiling() or not _may_wait():
        return None
    options = (running_mean, running_var, weight, bias, groups, training, momentum, eps, casts)
    if type(input) is Pending:
        if groups == 0 and training is False:
            folded = _with_batch_norm(owner, input, running_mean, running_var, weight, bias, eps)
            if folded is not None:
                return folded
        biased = _bias_apart(input)
        normed = biased.taken_by(_norm_in_two_steps, owner, *options) if biased is not None else None
        if normed is not None:
            return normed
        _compute_among((input,))
    return _norm_in_two_steps(owner, input, None, *options)


def _norm_in_two_steps(
    owner: Any,
    input: Any,
    input_bias: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any,
    bias: Any,
    groups: Any,
    training: Any,
    momentum: Any,
    eps: Any,
    casts: bool,
) -> Tensor | None:
    """Return a norm that waits, of an input to which a bias is added, perhaps."""
    if type(input) is not Tensor or input.is_inference():  # which has no version
        return None
    is_cuda, is_float = input.is_cuda, False
    if is_cuda:
        is_float = casts and torch.is_autocast_enabled("cuda") and input.dtype in _HALVES
        fewest = _FEWEST_CAST if is_float else _FEWEST_ON_CUDA
    else:
        fewest = _FEWEST_IN_GROUPS if groups else _FEWEST if torch.is_grad_enabled() else _FEWEST_IN_A_CALL
    if input.numel() < fewest or not (is_cuda or input.is_cpu):
        return None
    if owner is None or _is_read_early(owner) or _is_observed():
        return None
    if type(weight) not in _PLAIN or type(bias) not in _PLAIN or type(training) is not bool:
        return None
    if not isinstance(eps, float) or not isinstance(momentum, float) or type(groups) is not int:
        return None
    mean, deviation, result = torch.ops.nhwc.norm_waiting._op(
        input, running_mean, running_var, weight, bias, groups, training, momentum, eps, is_float, input_bias
    )
    if result is None:
        return None
    operands = (input, mean, deviation, weight, bias, input_bias)
    return _as_pending(result, Waiting(owner, operands, (groups, training, eps, is_float)))


def _bias_apart(input: Any) -> WaitingBias | None:
    """Return what a convolution's result waits with, if that is its bias alone."""
    waiting = input.waiting if type(input) is Pending else None
    is_alone = isinstance(waiting, WaitingBias) and not waiting.gains and waiting.grad_mode == torch.is_grad_enabled()
    return waiting if is_alone else None  # type: ignore[return-value]


def pending_normalization(
    owner: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, scale: float, eps: float
) -> Tensor | None:
    """Return a result of `functional.normalize` that waits, or `None` where it is to be computed at once."""
    if torch.compiler.is_compiling() or not _may_wait():
        return None
    options = (weight, bias, scale, eps)
    biased = None if torch.is_grad_enabled() else _bias_apart(input)
    normed = biased.taken_by(_waiting_normalization, owner, *options) if biased is not None else None
    if normed is not None:
        return normed
    _compute_among((input,))
    return _waiting_normalization(owner, input, None, *options)


def _waiting_normalization(
    owner: Any, input: Any, input_bias: Any, weight: Any, bias: Any, scale: float, eps: float
) -> Tensor | None:
    if type(input) is not Tensor or input.is_inference() or type(weight) not in _PLAIN or type(bias) not in _PLAIN:
        return None
    if input.numel() < (_FEWEST_ON_CUDA if input.is_cuda else _FEWEST_IN_GROUPS) or _is_read_early(owner):
        return None
    options = (scale, eps)
    result = None if _is_observed() else torch.ops.nhwc.normalize_waiting._op(input, weight, bias, *options, input_bias)
    if result is None:
        return None
    return _as_pending(result, WaitingNormalization(owner, (input, weight, bias, input_bias), options))


def _with_batch_norm(
    owner: Any, input: Any, running_mean: Any, running_var: Any, weight: Any, bias: Any, eps: Any
) -> Tensor | None:
    """Return the result of a convolution that waits and of a batch norm, which waits as well."""
    waiting = input.waiting
    if type(waiting) is not WaitingConvolution or waiting.gains or torch.is_grad_enabled() or _is_observed():
        return None
    of_norm, channels = (running_mean, running_var, weight, bias), waiting.operands[1].shape[:1]
    for each in of_norm:
        if type(each) not in _PLAIN or (each is not None and (each.shape != channels or not each.is_cpu)):
            return None
    if running_mean is None or running_var is None or type(eps) is not float:
        return None
    options = (*waiting.options[:-1], eps)
    waiting.is_taken = True
    waiting = WaitingConvolution(waiting.owner, (*waiting.operands[:3], *of_norm), options, waiting.read)
    waiting.norm = owner
    return _as_pending(_waiting_like(input), waiting)


def _are_alike(residual: Tensor, result: Tensor) -> bool:
    is_alike = residual.shape == result.shape and residual.dtype == result.dtype and residual.device == result.device
    return is_alike and residual.stride() == result.stride()


def _waiting_like(result: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return torch.ops.nhwc.waiting_like._op(result)


def group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Call `functional.group_norm`, or return a result that waits."""
    if not is_scripting():
        waiting = pending_norm(weight, input, None, None, weight, bias, num_groups, True, 0.0, eps, casts=True)
        if waiting is not None:
            return waiting
    return functional.group_norm(input, num_groups, weight, bias, eps)


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Call `functional.batch_norm`, or return a result that waits."""
    if not is_scripting():
        waiting = pending_norm(weight, input, running_mean, running_var, weight, bias, 0, training, momentum, eps)
        if waiting is not None:
            return waiting
    return functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _may_wait() -> bool:
    return _is_on and not _local.is_at_once


def _is_observed() -> bool:
    """Return whether something looks at each operator, or at what is saved for the backward: then nothing waits."""
    return (
        torch._C._is_tracing()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    )


# --- What reads a result ---


def _compute_among(values: Any) -> None:
    """Compute the results that wait among the arguments of a function."""
    for each in values:
        if type(each) is Pending:
            waiting = each.waiting
            if waiting is not None:  # otherwise another thread has just computed it
                waiting.read_early(each)
        elif isinstance(each, list | tuple):
            _compute_among(each)


def _is_traced_by_dynamo() -> bool:
    """Return whether a graph is made of what reads a result: it is made again for one that waits, each time."""
    return torch._guards.TracingContext.try_get() is not None


def _count_early_read(owner: Any, kind: Any) -> None:
    key = (id(owner), kind)
    _remember(_early_reads, key, owner, _early_reads.get(key, 0) + (_MOST_EARLY_READS if _is_traced_by_dynamo() else 1))


def _remember(values: dict[Any, Any], key: Any, owner: Any, value: Any) -> None:
    """Keep a value of an owner, as long as that lives."""
    if key not in values:
        weakref.finalize(owner, values.pop, key, None)
    values[key] = value


def _is_read_early(owner: Any, kind: Any = None) -> bool:
    kind = torch.is_grad_enabled() if kind is None else kind
    return _early_reads.get((id(owner), kind), 0) >= _MOST_EARLY_READS


def _become(result: Any, value: Tensor) -> Tensor:
    """Give a result its memory and its derivative, once: other threads may compute it, and then read that memory."""
    with _lock:
        if type(result) is Pending:
            with torch._C.DisableTorchFunctionSubclass():
                torch.ops.nhwc.waiting_become_._op(result, value)
            _as_plain(result)
    return result


def _as_plain(result: Any) -> None:
    result.__class__ = Tensor  # whose operators ask nobody
    result.waiting = None


_lock = threading.Lock()
# How often the results of an owner were read by something else, by its id and the grad mode, or, where they wait for
# zeros around them, `_PADDING`; and the sizes of which a convolution does not wait.
_early_reads: dict[tuple[int, Any], int] = {}
_refused: dict[int, torch.Size] = {}


def _activated(
    result: Any, activation: str, parameter: float, inplace: bool, slope: Tensor | None = None
) -> Tensor | None:
    """Compute a norm and the activation that reads it, unless the grad mode has changed between them."""
    waiting = result.waiting if type(result) is Pending else None
    if waiting is None or not waiting.takes_more or waiting.grad_mode != torch.is_grad_enabled():
        return None
    if activation not in waiting.activations:
        return None
    if slope is not None and waiting.residual is not None and torch.is_grad_enabled():
        return None  # the derivative of a residual is read from the output
    value = waiting.compute(activation, parameter, slope)
    out = value
    if inplace:
        out = _become(result, value)
        if _is_known_finite(value):
            _remember_finite(out)
    if type(out) is Tensor and out.is_cpu and _may_be_padded(waiting.owner):
        _as_pending(out, Known(waiting.owner, activation == "relu" and parameter < math.inf))
    return out


def _may_be_padded(owner: Any) -> bool:
    return _local.is_padding_apart and _may_wait() and not _is_read_early(owner, _PADDING)


def _pad(input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Tensor | None:
    """Put zeros around a result, or let them wait for a convolution."""
    waiting = input.waiting if type(input) is Pending else None
    if waiting is None or not _are_zeros_around(input, pad, mode, value):
        return None
    if not input.is_cpu or not _may_be_padded(waiting.owner):
        return None
    if type(waiting) is Known and waiting.padded is None:
        _as_plain(input)
    else:
        _compute_among((input,))
    is_bounded = type(waiting) is Known and waiting.is_bounded
    out = _padded(waiting.owner, input, pad, is_bounded)
    if out is not None:
        _as_pending(input, Known(waiting.owner, is_bounded, out))
    return out


def _are_zeros_around(input: Tensor, pad: Any, mode: str, value: Any) -> bool:
    is_spatial = isinstance(pad, list | tuple) and len(pad) % 2 == 0 and 0 < len(pad) <= 2 * (input.dim() - 2)
    return mode == "constant" and not value and is_spatial and all(type(each) is int and each >= 0 for each in pad)


def _padded(owner: Any, input: Tensor, pad: Any, is_bounded: bool) -> Tensor | None:
    """Return a tensor with zeros around it, which wait."""
    if input.is_inference() or not input.is_contiguous(memory_format=CHANNELS_LAST[input.dim()]):
        return None
    padded = Padded(owner, (input,), tuple(pad))
    padded.is_bounded = is_bounded
    return _as_pending(torch.ops.nhwc.pad_waiting._op(input, pad), padded)


def padded_by_layer(owner: Any, input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Tensor | None:
    """Put zeros around what a convolution's own forward pads: they wait for its convolution."""
    if torch.compiler.is_compiling() or type(input) not in (Tensor, Pending) or _is_observed():
        return None
    if not _may_wait() or _is_read_early(owner, _PADDING) or not _are_zeros_around(input, pad, mode, value):
        return None
    _compute_among((input,))
    if not (input.is_cpu or input.is_cuda):
        return None
    return _padded(owner, input, pad, is_bounded=False)


def convolved_by_layer(owner: Any, name: str, axes: int, *arguments: Any) -> Tensor | None:
    """Convolve an input with zeros around it that wait for this, or whose bias waits; `None` for others."""
    if len(arguments) != 7 or type(arguments[0]) not in (Tensor, Pending):
        return None
    is_padded = type(arguments[0]) is Pending and type(arguments[0].waiting) is Padded
    if not is_padded and (arguments[2] is None or not _adds_bias_apart(arguments[0])):
        return None
    return convolution(owner, name, axes, *arguments[:3], arguments[3:])


def _relu(input: Tensor, inplace: bool = False) -> Tensor | None:
    return _activated(input, "relu", math.inf, inplace)


def _relu_(input: Tensor) -> Tensor | None:
    return _activated(input, "relu", math.inf, True)


def _relu6(input: Tensor, inplace: bool = False) -> Tensor | None:
    return _activated(input, "relu", 6.0, inplace)


def _hardtanh(input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Tensor | None:
    return _activated(input, "relu", float(max_val), inplace) if min_val == 0 < max_val else None


def _leaky_relu(input: Tensor, negative_slope: float = 0.01, inplace: bool = False) -> Tensor | None:
    return _activated(input, "leaky_relu", float(negative_slope), inplace)


def _prelu(input: Tensor, weight: Tensor) -> Tensor | None:
    if type(weight) not in _PLAIN or weight.dim() > 1 or weight.device != input.device:
        return None
    if torch.is_autocast_enabled(kind := weight.device.type):
        weight = weight.to(torch.get_autocast_dtype(kind))
    if weight.dtype != input.dtype or weight.numel() not in (1, input.shape[1]):
        return None
    return _activated(input, "leaky_relu", 0.0, False, weight)


def _silu(input: Tensor, inplace: bool = False) -> Tensor | None:
    return _activated(input, "silu", 0.0, inplace)


def _gelu(input: Tensor, approximate: str = "none") -> Tensor | None:
    names = {"none": "gelu", "tanh": "gelu_tanh"}
    return _activated(input, names[approximate], 0.0, False) if approximate in names else None


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor | None:
    """Return the result, which still waits, where nothing is dropped."""
    return input if p == 0 or (not training and 0 < p <= 1) else None


def _add(input: Any, other: Any, alpha: Any = 1, out: Any = None) -> Tensor | None:
    """Return a sum that waits as well. The sum of two that wait computes the second one."""
    if alpha != 1 or out is not None:
        return None
    _read_known(input, other)
    return _sum(input, other) if type(input) is Pending else _sum(other, input)


def _add_(input: Any, other: Any, alpha: Any = 1) -> Tensor | None:
    """Add to a result that waits."""
    _read_known(input, other)
    added = _sum(input, other) if alpha == 1 else None
    if added is None:
        return None
    with _lock, torch._C.DisableTorchFunctionSubclass():
        torch.ops.nhwc.waiting_become_._op(input, added)
    input.waiting = added.waiting  # type: ignore[attr-defined]
    return input


def _read_known(*results: Any) -> None:
    """Make plain tensors of what has memory, so that it is added to what has none."""
    for each in results:
        if type(each) is Pending and type(each.waiting) is Known:
            each.waiting.read_early(each)


def _sum(result: Any, residual: Any) -> Tensor | None:
    waiting = result.waiting if type(result) is Pending else None
    if waiting is None or not waiting.takes_more or waiting.residual is not None:
        return None
    if waiting.grad_mode != torch.is_grad_enabled():
        return None
    if type(residual) is Pending:
        _compute_among((residual,))
    if type(residual) is not Tensor or residual.is_inference():
        return None
    added = waiting.with_residual(result, residual)
    if added is None:
        return None
    waiting.is_taken = True
    read = [*waiting.read, (residual, residual._version)]
    _as_pending(added, type(waiting)(waiting.owner, waiting.operands, waiting.options, read))
    added.waiting.residual, added.waiting.norm = residual, waiting.norm  # type: ignore[attr-defined]
    return added


def _remember_finite(value: Tensor) -> None:
    key = id(value)
    _finite[key] = (weakref.ref(value, lambda _: _finite.pop(key, None)), value._version)


def _is_known_finite(tensor: Tensor | None) -> bool:
    return tensor is None or _finite.get(id(tensor), _UNKNOWN)[1] == tensor._version


_UNKNOWN = (None, -1)
# References to tensors whose numbers are known to be finite, with their versions, by their ids.
_finite: dict[int, tuple[Any, int]] = {}
_PLAIN = (Tensor, nn.Parameter, type(None))
_NO_PADDING = ("valid", (0, 0), (0, 0, 0))
_HALVES = (torch.bfloat16, torch.float16)
# The functions with which one pass computes a norm.
_READERS: dict[Any, Any] = {
    F.relu: _relu,
    torch.relu: _relu,
    Tensor.relu: _relu,
    torch.relu_: _relu_,
    Tensor.relu_: _relu_,
    F.relu6: _relu6,
    F.hardtanh: _hardtanh,
    F.leaky_relu: _leaky_relu,
    F.prelu: _prelu,
    F.silu: _silu,
    F.gelu: _gelu,
    F.dropout: _dropout,
    F.pad: _pad,
    functional.keeping_class("gelu"): _gelu,
    torch.add: _add,
    Tensor.add: _add,
    Tensor.add_: _add_,
}
# What can be asked of a result without its values.
_WITHOUT_VALUES = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cpu", "is_cuda")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.element_size),
    *(Tensor.stride, Tensor.is_contiguous),
}
