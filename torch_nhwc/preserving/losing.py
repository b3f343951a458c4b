"""The one table of the layers that lose on channels-last: what each loses, and what stands in for it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from torch_nhwc.preserving import layers


def _over_channels(layer: Any) -> bool:
    return layer.dim in (1, -3, -4)  # the channels, of images and of volumes


def _of_one_tap(layer: Any) -> bool:
    """In the plane, without a stride there; along depth there may be more, with a stride and padding of zeros."""
    in_plane = all(size == 1 for size in (*layer.kernel_size[1:], *layer.stride[1:]))
    along_depth = layer.kernel_size[0] == 1 or (layer.groups == 1 and not isinstance(layer.padding, str))
    return layer.padding_mode == "zeros" and in_plane and along_depth


def _is_circular(layer: Any) -> bool:
    return bool(layer.padding_mode == "circular")


def _is_unpadded(layer: Any) -> bool:
    """In the plane: the padding of its two dimensions comes first."""
    return _is_circular(layer) or not any(layer._reversed_padding_repeated_twice[:4])


def _is_nearest(layer: Any) -> bool:
    return layer.mode in ("nearest", "nearest-exact") and not layer.recompute_scale_factor


def _always(layer: Any) -> bool:
    return True


class Loss(NamedTuple):
    """What is known of a class that loses."""

    preserving: type[nn.Module]
    """What stands in for it."""
    loses: str
    """What follows "on channels-last it loses"."""
    concerns: Callable[[Any], bool] = _always
    """Whether a layer is one of those that lose; one that does not has no row in a plan."""
    serves: Callable[[Any], bool] = _always
    """Whether there is a form of ours for its arguments."""


_POOL = "the format, forward and backward, and with it speed"
_WINDOWS = "speed, forward and backward"
LOSSES: dict[type[nn.Module], Loss] = {
    nn.GroupNorm: Loss(
        layers.PreservingGroupNorm,
        "accuracy, forward and backward, the more the farther means lie from zero; and speed, above all backward",
    ),
    nn.InstanceNorm2d: Loss(
        layers.PreservingInstanceNorm2d,
        "the gradient where the batch is 1; the format; and speed, forward and backward",
    ),
    nn.InstanceNorm3d: Loss(
        layers.PreservingInstanceNorm3d,
        "the gradient where the batch is 1; the format; and speed, forward and backward",
    ),
    nn.GELU: Loss(layers.PreservingGELU, _WINDOWS),
    nn.Softmax: Loss(layers.PreservingSoftmax, _WINDOWS, serves=_over_channels),
    nn.Softmax2d: Loss(layers.PreservingSoftmax2d, _WINDOWS),
    nn.LogSoftmax: Loss(layers.PreservingLogSoftmax, _WINDOWS, serves=_over_channels),
    nn.CrossEntropyLoss: Loss(layers.PreservingCrossEntropyLoss, "speed forward"),
    nn.AvgPool3d: Loss(layers.PreservingAvgPool3d, _POOL),
    nn.AdaptiveAvgPool3d: Loss(layers.PreservingAdaptiveAvgPool3d, _POOL),
    nn.AdaptiveMaxPool3d: Loss(layers.PreservingAdaptiveMaxPool3d, _POOL),
    nn.LPPool3d: Loss(layers.PreservingLPPool3d, _POOL),
    nn.CircularPad2d: Loss(layers.PreservingCircularPad2d, "the format and speed forward"),
    nn.CircularPad3d: Loss(layers.PreservingCircularPad3d, "the format and speed forward"),
    nn.Conv2d: Loss(layers.PreservingConv2d, "the format and speed forward, in its circular padding", _is_circular),
    nn.Conv3d: Loss(
        layers.PreservingConv3d,
        "speed, forward and backward",
        lambda layer: _is_circular(layer) or _of_one_tap(layer),
        _is_unpadded,
    ),
    nn.Upsample: Loss(layers.PreservingUpsample, "the format backward", _is_nearest),
}

# Subclasses in other packages that leave the method alone which the exchange overrides: they were looked at one by one.
# Left out, since their own forward takes the place of the one that is overridden, or calls it for other activations:
# - monai: MaisiGroupNorm3D computes its statistics itself.
# - diffusers: WanUpsample, QwenImageUpsample and QwenImage21Upsample are 2D; MiniMaxH3VideoGroupNorm makes each frame
#   contiguous, and MiniMaxH3VideoCausalConv3d calls the function.
# - transformers: Emu3VQVAEGroupNorm and BitGroupNormActivation call the function; PeVideoMaskedGroupNorm and those of
#   its kind take a mask, and sequences.
_DIFFUSERS = "diffusers.models.autoencoders.autoencoder_"
KNOWN_SUBCLASSES = frozenset(
    {
        f"{_DIFFUSERS}kandinsky6_sr.Kandinsky6SRSafeConv3d",
        f"{_DIFFUSERS}kl_cogvideox.CogVideoXSafeConv3d",
        f"{_DIFFUSERS}kl_cosmos.CosmosCausalConv3d",
        f"{_DIFFUSERS}kl_kvae_video.KVAESafeConv3d",
        f"{_DIFFUSERS}kl_magvit.EasyAnimateCausalConv3d",
        f"{_DIFFUSERS}kl_qwenimage.QwenImageCausalConv3d",
        f"{_DIFFUSERS}kl_wan.WanCausalConv3d",
        "diffusers.models.latent_upscaler.latent_upscaler_kandinsky6_sr.Kandinsky6SRLatentUpscalerConv3d",
        "transformers.models.poolformer.modeling_poolformer.PoolFormerGroupNorm",
    }
)


def loss_of(layer_type: type) -> tuple[type[nn.Module], Loss] | None:
    """The class of the table that a class is, or derives from, and what it loses; `None` where it is none of them."""
    return next(((base, LOSSES[base]) for base in layer_type.__mro__ if base in LOSSES), None)


def is_known(layer_type: type) -> bool:
    """Whether the exchange is right for a class: it is one of the table, or a subclass that was looked at."""
    return layer_type in LOSSES or f"{layer_type.__module__}.{layer_type.__qualname__}" in KNOWN_SUBCLASSES
