"""The subclasses that stand in for PyTorch's layers: each overrides the one method that calls what loses.

Every call goes through `torch_nhwc.functional`, by which a compiler sees PyTorch's own operators, and TorchScript ours.
A saved module names this file: its classes stay here.
"""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._jit_internal import is_scripting

from torch_nhwc import functional


class Preserving:
    """What the layers here have in common, so that an exchanged one is known by its class."""


class PreservingGroupNorm(Preserving, nn.GroupNorm):
    """`GroupNorm` that is accurate on channels-last."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class PreservingInstanceNorm2d(Preserving, nn.InstanceNorm2d):
    """`InstanceNorm2d` whose gradient is right on channels-last."""

    def _apply_instance_norm(self, input: Tensor) -> Tensor:
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


class PreservingGELU(Preserving, nn.GELU):
    """`GELU` that goes over memory in order."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.gelu(input, approximate=self.approximate)


class PreservingSoftmax(Preserving, nn.Softmax):
    """`Softmax` over channels that lie side by side."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.softmax(input, self.dim, _stacklevel=5)


class PreservingSoftmax2d(Preserving, nn.Softmax2d):
    """`Softmax2d`, the same."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() not in (3, 4):
            raise ValueError(f"Softmax2d: expected input to be 3D or 4D, got {input.dim()}D instead")
        return functional.softmax(input, -3, _stacklevel=5)


class PreservingLogSoftmax(Preserving, nn.LogSoftmax):
    """`LogSoftmax` over channels that lie side by side."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.log_softmax(input, self.dim, _stacklevel=5)


class PreservingCrossEntropyLoss(Preserving, nn.CrossEntropyLoss):
    """`CrossEntropyLoss` over channels that lie side by side."""

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


class PreservingLPPool3d(Preserving, nn.LPPool3d):
    """`LPPool3d` that keeps the format."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.lp_pool3d(input, float(self.norm_type), self.kernel_size, self.stride, self.ceil_mode)


class PreservingCircularPad2d(Preserving, nn.CircularPad2d):
    """`CircularPad2d` that goes over memory in order."""

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        return functional.pad(input, self.padding, "circular")  # type: ignore[arg-type]


class PreservingCircularPad3d(Preserving, nn.CircularPad3d):
    """`CircularPad3d`, the same."""

    forward = PreservingCircularPad2d.forward


class PreservingConv2d(Preserving, nn.Conv2d):
    """`Conv2d` with a circular padding that goes over memory in order."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.padding_mode == "zeros":  # by now, though not when it was exchanged
            return F.conv2d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        padded = functional.pad(input, self._reversed_padding_repeated_twice, self.padding_mode)
        return F.conv2d(padded, weight, bias, self.stride, (0, 0), self.dilation, self.groups)


class PreservingConv3d(Preserving, nn.Conv3d):
    """`Conv3d` of one tap in the plane, or with circular padding."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.padding_mode != "zeros":
            input = functional.pad(input, self._reversed_padding_repeated_twice, self.padding_mode)
            padding = 0, 0, 0
        elif isinstance(self.padding, str):
            if self.kernel_size != (1, 1, 1):  # by now, though not when it was exchanged
                return F.conv3d(input, weight, bias, self.stride, self.padding, self.dilation, self.groups)
            padding = 0, 0, 0  # whatever the name: it is of one tap
        else:
            padding = self.padding  # type: ignore[assignment]
        return functional.conv3d(input, weight, bias, self.stride, padding, self.dilation, self.groups)


class PreservingUpsample(Preserving, nn.Upsample):
    """`Upsample` to the nearest, in 3D, whose gradient keeps the format."""

    def forward(self, input: Tensor) -> Tensor:
        if is_scripting():  # which compiles no code that looks at what kind of number it got
            return F.interpolate(
                input,
                self.size,
                self.scale_factor,
                self.mode,
                self.align_corners,
                recompute_scale_factor=self.recompute_scale_factor,
            )
        return functional.interpolate(
            input,
            self.size,
            self.scale_factor,
            self.mode,
            self.align_corners,
            recompute_scale_factor=self.recompute_scale_factor,
        )
