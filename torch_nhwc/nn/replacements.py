"""Subclasses of PyTorch's layers that keep channels-last, and the table of the layers that they replace.

On channels-last, these layers lose the format, speed, accuracy or the right gradient. A replacement overrides the one
method that calls the function at fault, and calls the one of `torch_nhwc.functional` instead.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from torch_nhwc import functional
from torch_nhwc.layout import CHANNELS_LAST, to_format
from torch_nhwc.nn.class_swap import Swap, swapped_class
from torch_nhwc.nn.own_forward import with_our_functions
from torch_nhwc.nn.pending import convolution, is_small, never_waits, pending_norm, pending_normalization


class Preserving(Swap):
    """A layer that keeps channels-last; `swap_class(layer, Preserving)` makes one of a layer in `REPLACEMENTS`."""

    prefix = "Preserving"
    order = 0

    @classmethod
    def mixin_for(cls, layer_type: type) -> type:
        """Return the class that replaces a class of the table, or one that derives from it.

        Raises:
            TypeError: the table has no such class.
        """
        replacement = replacement_for(layer_type)
        if replacement is None:
            raise TypeError(f"torch_nhwc: {layer_type.__name__} loses nothing on channels-last")
        if has_pytorchs_methods(layer_type) or not calls_pytorchs_function(layer_type):
            return replacement.preserving
        return type("PreservingOwnForward", (Preserving,), {"forward": with_our_functions(layer_type)})


def is_preserving(layer_type: type) -> bool:
    """Return whether layers of a class keep channels-last, and have another class without that."""
    return issubclass(layer_type, Preserving)


class PreservingGroupNorm(Preserving, nn.GroupNorm):
    """`GroupNorm` that is accurate on channels-last."""

    def forward(self, input: Tensor) -> Tensor:
        if not is_scripting():  # noqa: SIM102  as TorchScript reads it
            if not is_small(input):
                waiting = pending_norm(
                    self, input, None, None, self.weight, self.bias, self.num_groups, True, 0.0, self.eps, casts=True
                )
                if waiting is not None:
                    return waiting
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class PreservingInstanceNorm2d(Preserving, nn.InstanceNorm2d):
    """`InstanceNorm2d` whose gradient is right on channels-last."""

    def _apply_instance_norm(self, input: Tensor) -> Tensor:
        if not is_scripting():  # noqa: SIM102  as TorchScript reads it
            if not is_small(input) and self.running_mean is None and input.dim() > 3:
                waiting = pending_norm(
                    self, input, None, None, self.weight, self.bias, input.shape[1], True, 0.0, self.eps
                )
                if waiting is not None:
                    return waiting
        return functional.instance_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            self.momentum if self.momentum is not None else 0.0,
            self.eps,
        )


class PreservingInstanceNorm3d(Preserving, nn.InstanceNorm3d):
    """`InstanceNorm3d` whose gradient is right on channels-last."""

    _apply_instance_norm = PreservingInstanceNorm2d._apply_instance_norm


class PreservingBatchNorm2d(Preserving, nn.BatchNorm2d):
    """`BatchNorm2d` that is accurate on channels-last."""

    def forward(self, input: Tensor) -> Tensor:
        if not is_scripting():  # noqa: SIM102  as TorchScript reads it
            # With running statistics PyTorch's layer is right.
            if not self.training and self._buffers.get("running_mean") is not None and never_waits(input):
                return nn.modules.batchnorm._BatchNorm.forward(self, input)
        self._check_input_dim(input)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the average of all batches
                factor = 1.0 / float(self.num_batches_tracked)
        has_statistics = self.running_mean is not None or self.running_var is not None
        is_tracked = self.track_running_stats or not self.training
        is_of_input = self.training or not has_statistics
        mean = self.running_mean if is_tracked else None
        variance = self.running_var if is_tracked else None
        if not is_scripting():  # noqa: SIM102  as TorchScript reads it
            if not is_small(input):
                waiting = pending_norm(
                    self, input, mean, variance, self.weight, self.bias, 0, is_of_input, factor, self.eps
                )
                if waiting is not None:
                    return waiting
        return functional.batch_norm(input, mean, variance, self.weight, self.bias, is_of_input, factor, self.eps)


class PreservingBatchNorm3d(Preserving, nn.BatchNorm3d):
    """`BatchNorm3d` that is accurate on channels-last."""

    forward = PreservingBatchNorm2d.forward


class PreservingChannelRms(Preserving, nn.Module):
    """RMS norm over the channels, which each video autoencoder of diffusers has a class of its own for, in one pass."""

    gamma: Tensor
    bias: Any  # or a number
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        gamma, bias = self.gamma, self.bias if isinstance(self.bias, Tensor) else None
        is_beside = x.dim() == gamma.dim() + 1 and x.dim() in CHANNELS_LAST and x.dtype == gamma.dtype
        if not is_beside or functional.is_exported() or not x.is_contiguous(memory_format=CHANNELS_LAST[x.dim()]):
            return super().forward(x)
        waiting = pending_normalization(self, x, gamma, bias, self.scale, _LEAST_LENGTH)
        if waiting is not None:
            return waiting
        return functional.normalize(x, eps=_LEAST_LENGTH, weight=gamma, bias=bias, scale=self.scale)


class PreservingGELU(Preserving, nn.GELU):
    """`GELU` that reads memory in order."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(input, approximate=self.approximate)


class PreservingLinear(Preserving, nn.Linear):
    """`Linear` that computes half precision by way of float32 where oneDNN does not take it."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight, self.bias)


class PreservingSoftmax(Preserving, nn.Softmax):
    """`Softmax` over adjacent channels."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.softmax(input, self.dim, _stacklevel=5)


class PreservingSoftmax2d(Preserving, nn.Softmax2d):
    """`Softmax2d` over adjacent channels."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() not in (3, 4):
            raise ValueError(f"Softmax2d: expected input to be 3D or 4D, got {input.dim()}D instead")
        return functional.softmax(input, -3, _stacklevel=5)


class PreservingLogSoftmax(Preserving, nn.LogSoftmax):
    """`LogSoftmax` over adjacent channels."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.log_softmax(input, self.dim, _stacklevel=5)


class PreservingCrossEntropyLoss(Preserving, nn.CrossEntropyLoss):
    """`CrossEntropyLoss` over adjacent channels."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(
            input,
            target,
            weight=self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class PreservingAvgPool3d(Preserving, nn.AvgPool3d):
    """`AvgPool3d` that keeps the format."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.avg_pool3d(
            input,
            self.kernel_size,
            self.stride,
            self.padding,
            self.ceil_mode,
            self.count_include_pad,
            self.divisor_override,
        )


class PreservingAdaptiveAvgPool3d(Preserving, nn.AdaptiveAvgPool3d):
    """`AdaptiveAvgPool3d` that keeps the format."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.adaptive_avg_pool3d(input, self.output_size)


class PreservingAdaptiveMaxPool3d(Preserving, nn.AdaptiveMaxPool3d):
    """`AdaptiveMaxPool3d` that keeps the format."""

    def forward(self, input):  # type: ignore[no-untyped-def]
        return functional.adaptive_max_pool3d(input, self.output_size, self.return_indices)


class PreservingMaxUnpool3d(Preserving, nn.MaxUnpool3d):
    """`MaxUnpool3d` that keeps the format."""

    def forward(self, input: Tensor, indices: Tensor, output_size: list[int] | None = None) -> Tensor:
        return functional.max_unpool3d(input, indices, self.kernel_size, self.stride, self.padding, output_size)


class PreservingCircularPad2d(Preserving, nn.CircularPad2d):
    """`CircularPad2d` that reads memory in order."""

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        return functional.pad(input, self.padding, "circular")  # type: ignore[arg-type]


class PreservingCircularPad3d(Preserving, nn.CircularPad3d):
    """`CircularPad3d` that reads memory in order."""

    forward = PreservingCircularPad2d.forward


class PreservingReflectionPad2d(Preserving, nn.ReflectionPad2d):
    """`ReflectionPad2d` that keeps the format on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.pad(input, self.padding, "reflect")  # type: ignore[arg-type]


class PreservingReflectionPad3d(Preserving, nn.ReflectionPad3d):
    """`ReflectionPad3d` that keeps the format on a GPU."""

    forward = PreservingReflectionPad2d.forward


class PreservingReplicationPad2d(Preserving, nn.ReplicationPad2d):
    """`ReplicationPad2d` that keeps the format on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.pad(input, self.padding, "replicate")  # type: ignore[arg-type]


class PreservingReplicationPad3d(Preserving, nn.ReplicationPad3d):
    """`ReplicationPad3d` that keeps the format on a GPU."""

    forward = PreservingReplicationPad2d.forward


class PreservingUpsample(Preserving, nn.Upsample):
    """`Upsample` that is one pass over memory on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        options = (self.size, self.scale_factor, self.mode, self.align_corners, self.recompute_scale_factor)
        if not is_scripting():
            return functional.interpolate(input, *options)  # type: ignore[arg-type]
        return F.interpolate(input, options[0], options[1], options[2], options[3], options[4])


class PreservingPixelShuffle(Preserving, nn.PixelShuffle):
    """`PixelShuffle` that takes volumes."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.pixel_shuffle(input, self.upscale_factor)


class PreservingPixelUnshuffle(Preserving, nn.PixelUnshuffle):
    """`PixelUnshuffle` that takes volumes."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.pixel_unshuffle(input, self.downscale_factor)


def _one_channel_in_format(input: Tensor) -> Tensor:
    """Return an input of one channel, which is in both formats at once, with the strides of channels-last.

    The weight of one channel is contiguous, so that only these strides say in which format the result is to be.
    """
    if not is_scripting():
        return input if functional.is_exported() else to_format(input)
    return to_format(input)


class PreservingConv2d(Preserving, nn.Conv2d):
    """`Conv2d` whose numbers are right for every shape, with a circular padding that reads memory in order."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.in_channels == 1 and input.dim() == 4:
            input = _one_channel_in_format(input)
        if self.padding_mode != "zeros":
            padded = functional.pad(input, self._reversed_padding_repeated_twice, self.padding_mode)
            return functional.conv2d(padded, weight, bias, self.stride, (0, 0), self.dilation, self.groups)
        if not is_scripting():
            options = (self.stride, self.padding, self.dilation, self.groups)
            return convolution(self, "conv2d", 2, input, weight, bias, options)
        # In TorchScript a padding by name has a type of its own.
        return torch.ops.nhwc.conv2d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)


class PreservingConv3d(Preserving, nn.Conv3d):
    """`Conv3d` whose numbers are right for every shape, fast for a batch of 1 and with one tap in the plane."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.in_channels == 1 and input.dim() == 5:
            input = _one_channel_in_format(input)
        if self.padding_mode != "zeros":
            padded = functional.pad(input, self._reversed_padding_repeated_twice, self.padding_mode)
            return functional.conv3d(padded, weight, bias, self.stride, (0, 0, 0), self.dilation, self.groups)
        if not is_scripting():
            options = (self.stride, self.padding, self.dilation, self.groups)
            return convolution(self, "conv3d", 3, input, weight, bias, options)
        return torch.ops.nhwc.conv3d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)


class PreservingConvTranspose2d(Preserving, nn.ConvTranspose2d):
    """`ConvTranspose2d` whose gradients are right for every shape."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if self.padding_mode != "zeros":
            raise ValueError("Only `zeros` padding mode is supported for ConvTranspose2d")
        sizes = (self.stride, self.padding, self.kernel_size, 2, self.dilation)
        output_padding = self._output_padding(input, output_size, *sizes)  # type: ignore[arg-type]
        return functional.conv_transpose2d(
            input, self.weight, self.bias, self.stride, self.padding, output_padding, self.groups, self.dilation
        )


class PreservingConvTranspose3d(Preserving, nn.ConvTranspose3d):
    """`ConvTranspose3d` whose gradients are right for every shape, and which is fast for a batch of 1."""

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        if self.padding_mode != "zeros":
            raise ValueError("Only `zeros` padding mode is supported for ConvTranspose3d")
        sizes = (self.stride, self.padding, self.kernel_size, 3, self.dilation)
        output_padding = self._output_padding(input, output_size, *sizes)  # type: ignore[arg-type]
        return functional.conv_transpose3d(
            input, self.weight, self.bias, self.stride, self.padding, output_padding, self.groups, self.dilation
        )


def _is_over_channels(layer: Any) -> bool:
    return layer.dim in (1, -3, -4)  # the channels of images and of volumes


def _is_rms_over_channels(layer: Any) -> bool:
    gamma, bias = layer._parameters.get("gamma"), layer.bias
    has_parameters = type(gamma) is nn.Parameter and gamma.numel() == gamma.shape[0] == round(layer.scale**2)
    has_bias = bias is None or bias == 0.0 if not isinstance(bias, Tensor) else bias.shape == gamma.shape
    return has_parameters and has_bias and layer.channel_first is True


def _is_slow_in_half_precision(layer: Any) -> bool:
    """Return whether a linear layer is slow on this machine, in its dtype or in the bfloat16 of autocast.

    PyTorch's attention reads the weight of its projection, and calls no forward of it.
    """
    weight = layer._parameters.get("weight")  # a parametrized one would be computed if it were read
    dtype = torch.float32 if weight is None else weight.dtype
    if dtype not in (torch.float32, torch.bfloat16, torch.float16) or type(layer) is NonDynamicallyQuantizableLinear:
        return False
    return any(map(torch.ops.nhwc.computes_in_float32, (dtype, torch.bfloat16)))


class Replacement(NamedTuple):
    """A row of the table."""

    preserving: type[nn.Module]
    """The class that replaces the layer's."""
    gains: str
    """The end of a sentence on the replacement that begins with "it is"."""
    serves: Callable[[Any], bool] = lambda layer: True
    """Says of a layer if the replacement takes its arguments."""
    gains_here: Callable[[Any], bool] | None = None
    """Says of a layer if it gains on this machine, where that depends on the machine."""
    on_cpu: bool = True
    """Whether it gains on a CPU."""
    on_gpu: Callable[[Any], bool] = lambda layer: False
    """Says of a layer if it gains on a GPU where our kernels run."""
    gains_on_gpu: str | None = None
    """What it is there, if that is something else."""


def _always(layer: Any) -> bool:
    return True


def _has_pass_on_gpu(layer: Any) -> bool:
    """Return whether a convolution on a GPU has a pass beside it: a padding with what its input has, or a bias."""
    return layer.padding_mode != "zeros" or layer._parameters.get("bias") is not None


def _has_kernel(layer: Any) -> bool:
    return layer.mode in ("nearest", "nearest-exact", "bilinear", "trilinear")


_CONVOLUTION = "right for every shape, fast where PyTorch is slow, also by fewer multiplications"
_WITHOUT_PASSES = "fast where PyTorch is slow in this format, and without passes of its own for padding and bias"
_BATCH_NORM = "accurate for every size, and one pass with the activation after it"
_GROUP_NORM = "accurate for every mean, fast, and one pass with the activation after it"
_INSTANCE_NORM = "in channels-last and fast, right for a batch of 1, and one pass with the activation after it"
_CHANNEL_RMS_NORM = "one pass over memory, with the activation after it"
_FORMAT = "in channels-last, forward and backward, and fast"
_FAST = "fast, forward and backward"
_VOLUMES = "able to take volumes, too"
_FORWARD = "in channels-last and fast, forward"
_ONE_PASS = "in channels-last and one pass over memory, forward and backward"
_IN_FLOAT32 = "fast in half precision, where PyTorch's is slow on this CPU"
REPLACEMENTS: dict[type[nn.Module], Replacement] = {
    nn.GroupNorm: Replacement(PreservingGroupNorm, _GROUP_NORM, on_gpu=_always),
    nn.InstanceNorm2d: Replacement(PreservingInstanceNorm2d, _INSTANCE_NORM, on_gpu=_always),
    nn.InstanceNorm3d: Replacement(PreservingInstanceNorm3d, _INSTANCE_NORM, on_gpu=_always),
    nn.BatchNorm2d: Replacement(PreservingBatchNorm2d, _BATCH_NORM, on_gpu=_always),
    nn.BatchNorm3d: Replacement(PreservingBatchNorm3d, _BATCH_NORM, on_gpu=_always),
    nn.GELU: Replacement(PreservingGELU, _FAST),
    nn.Linear: Replacement(PreservingLinear, _IN_FLOAT32, gains_here=_is_slow_in_half_precision),
    nn.Softmax: Replacement(PreservingSoftmax, _FORMAT, serves=_is_over_channels),
    nn.Softmax2d: Replacement(PreservingSoftmax2d, _FORMAT),
    nn.LogSoftmax: Replacement(PreservingLogSoftmax, _FORMAT, serves=_is_over_channels),
    nn.CrossEntropyLoss: Replacement(PreservingCrossEntropyLoss, "fast forward, and in channels-last backward"),
    nn.AvgPool3d: Replacement(PreservingAvgPool3d, _FORMAT),
    nn.AdaptiveAvgPool3d: Replacement(PreservingAdaptiveAvgPool3d, _FORMAT),
    nn.AdaptiveMaxPool3d: Replacement(PreservingAdaptiveMaxPool3d, _FORMAT),
    nn.MaxUnpool3d: Replacement(PreservingMaxUnpool3d, _FORWARD),
    nn.CircularPad2d: Replacement(PreservingCircularPad2d, _FORWARD, on_gpu=_always),
    nn.CircularPad3d: Replacement(PreservingCircularPad3d, _FORWARD, on_gpu=_always),
    nn.ReflectionPad2d: Replacement(PreservingReflectionPad2d, _ONE_PASS, on_cpu=False, on_gpu=_always),
    nn.ReflectionPad3d: Replacement(PreservingReflectionPad3d, _ONE_PASS, on_cpu=False, on_gpu=_always),
    nn.ReplicationPad2d: Replacement(PreservingReplicationPad2d, _ONE_PASS, on_cpu=False, on_gpu=_always),
    nn.ReplicationPad3d: Replacement(PreservingReplicationPad3d, _ONE_PASS, on_cpu=False, on_gpu=_always),
    nn.Upsample: Replacement(PreservingUpsample, _ONE_PASS, on_cpu=False, on_gpu=_has_kernel),
    nn.PixelShuffle: Replacement(PreservingPixelShuffle, _VOLUMES),
    nn.PixelUnshuffle: Replacement(PreservingPixelUnshuffle, _VOLUMES),
    nn.Conv2d: Replacement(PreservingConv2d, _CONVOLUTION, on_gpu=_has_pass_on_gpu, gains_on_gpu=_WITHOUT_PASSES),
    nn.Conv3d: Replacement(PreservingConv3d, _CONVOLUTION, on_gpu=_has_pass_on_gpu, gains_on_gpu=_WITHOUT_PASSES),
    nn.ConvTranspose2d: Replacement(PreservingConvTranspose2d, _CONVOLUTION),
    nn.ConvTranspose3d: Replacement(PreservingConvTranspose3d, _CONVOLUTION),
}

# The RMS norms of video autoencoders, by what their forward names: at least these, and at most those.
_CHANNEL_RMS = Replacement(PreservingChannelRms, _CHANNEL_RMS_NORM, serves=_is_rms_over_channels, on_gpu=_always)
_NAMES_OF_RMS = frozenset(("F", "normalize", "channel_first", "scale", "gamma", "bias"))
_NAMES_OF_CASTS = frozenset(("dtype", "torch", "float16", "bfloat16", "any", "float", "to"))
_LEAST_LENGTH = 1e-12  # of `torch.nn.functional.normalize`

# The methods that a replacement may override; one that is set on the layer itself would still be called.
_METHODS = ("forward", "_conv_forward", "_apply_instance_norm")


def _methods_of(layer_type: type) -> list[object]:
    return [getattr(layer_type, name, None) for name in _METHODS]


# As PyTorch has them: a package may replace one, for all layers of a class.
_ORIGINAL_METHODS = {layer_type: _methods_of(layer_type) for layer_type in REPLACEMENTS}

# The classes of which a subclass may have a forward of its own that calls the function: what is replaced is the call.
_FUNCTIONS: dict[type[nn.Module], str] = {
    nn.GroupNorm: "group_norm",
    nn.InstanceNorm2d: "instance_norm",
    nn.InstanceNorm3d: "instance_norm",
    nn.BatchNorm2d: "batch_norm",
    nn.BatchNorm3d: "batch_norm",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
}


def replacement_for(layer_type: type) -> Replacement | None:
    """Return the row of the class that a class is, or derives from; `None` where the table has none."""
    listed = next((REPLACEMENTS[base] for base in layer_type.__mro__ if base in REPLACEMENTS), None)
    return _CHANNEL_RMS if listed is None and any(map(_has_channel_rms, layer_type.__mro__)) else listed


def is_known(layer_type: type) -> bool:
    """Return whether a swap is right for a class that is one of the table, or derives from one."""
    if layer_type in REPLACEMENTS or has_pytorchs_methods(layer_type) or calls_pytorchs_function(layer_type):
        return True
    return _has_channel_rms(layer_type) or (issubclass(layer_type, nn.Upsample) and _only_casts(layer_type))


def _names_of_forward(layer_type: type) -> frozenset[str]:
    """Return what the forward names of a class that has one of its own."""
    return frozenset(getattr(getattr(vars(layer_type).get("forward"), "__code__", None), "co_names", ()))


def _has_channel_rms(layer_type: type) -> bool:
    if not layer_type.__name__.endswith("RMS_norm"):
        return False
    return _NAMES_OF_RMS <= _names_of_forward(layer_type) <= _NAMES_OF_RMS | _NAMES_OF_CASTS


def _only_casts(layer_type: type) -> bool:
    """Return whether a forward is that of its base on floats, as which our kernels compute."""
    return _names_of_forward(layer_type) == {"super", "forward", "float", "type_as"}


def has_pytorchs_methods(layer_type: type) -> bool:
    """Return whether a class has the methods that a swap may override from PyTorch."""
    return any(_methods_of(layer_type) == _ORIGINAL_METHODS.get(base) for base in layer_type.__mro__)


def calls_pytorchs_function(layer_type: type) -> bool:
    """Return whether a method of a class's own names PyTorch's function, or calls the method of its base.

    Those of PyTorch itself are left out: its tools for quantization know layers by their class.
    """
    base = next((base for base in layer_type.__mro__ if base in REPLACEMENTS), None)
    if base not in _FUNCTIONS or layer_type.__module__.startswith("torch."):
        return False
    own = [vars(each).get(name) for each in layer_type.__mro__[: layer_type.__mro__.index(base)] for name in _METHODS]
    names = {name for method in own for name in getattr(getattr(method, "__code__", None), "co_names", ())}
    return any(name in ("super", *_METHODS) or _FUNCTIONS[base] in name for name in names)


def is_patched(layer_type: type) -> bool:
    """Return whether somebody has replaced a method that a swap would override, for all layers of a class."""
    bases = [base for base in layer_type.__mro__ if base in REPLACEMENTS]
    return any(_methods_of(base) != _ORIGINAL_METHODS[base] for base in bases)


def has_own_method(layer: nn.Module) -> bool:
    """Return whether somebody has replaced such a method on the layer itself."""
    return not layer.__dict__.keys().isdisjoint(_METHODS)


# Pickles name the classes above, which have to be known before any layer is swapped.
for _layer_type in REPLACEMENTS:
    swapped_class(_layer_type, Preserving)
