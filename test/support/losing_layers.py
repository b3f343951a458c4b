"""Layers that lose on channels-last, with odd arguments, and the shape of what each is given."""

import importlib

from torch import nn

LAYERS = {
    "group_norm": (lambda: nn.GroupNorm(3, 6), (2, 6, 5, 7)),
    "group_norm_3d": (lambda: nn.GroupNorm(1, 6, eps=1e-3, affine=False), (1, 6, 3, 5, 7)),
    "instance_norm": (lambda: nn.InstanceNorm2d(6), (1, 6, 5, 7)),
    "instance_norm_3d": (lambda: nn.InstanceNorm3d(6, affine=True, track_running_stats=True), (2, 6, 3, 5, 7)),
    # With so many rows that PyTorch's kernel would not stay.
    "batch_norm": (lambda: nn.BatchNorm2d(6), (2, 6, 24, 24)),
    "batch_norm_3d": (lambda: nn.BatchNorm3d(6, eps=1e-3, momentum=None), (2, 6, 3, 16, 16)),
    "gelu": (lambda: nn.GELU(), (2, 6, 5, 7)),
    "gelu_tanh": (lambda: nn.GELU("tanh"), (2, 6, 3, 5, 7)),
    "softmax": (lambda: nn.Softmax(1), (2, 6, 3, 5, 7)),
    "softmax_wide": (lambda: nn.Softmax(1), (2, 18, 3, 5, 2)),
    "softmax2d": (lambda: nn.Softmax2d(), (2, 6, 5, 7)),
    "log_softmax": (lambda: nn.LogSoftmax(-3), (2, 6, 5, 7)),
    "log_softmax_wide": (lambda: nn.LogSoftmax(1), (2, 18, 5, 7)),
    "avg_pool": (lambda: nn.AvgPool3d(2), (2, 6, 4, 5, 7)),
    "avg_pool_odd": (
        lambda: nn.AvgPool3d((3, 2, 3), (2, 1, 2), (1, 1, 0), ceil_mode=True, count_include_pad=False),
        (2, 6, 4, 5, 7),
    ),
    "avg_pool_divided": (lambda: nn.AvgPool3d(2, padding=1, divisor_override=3), (2, 6, 4, 5, 7)),
    "adaptive_avg_pool": (lambda: nn.AdaptiveAvgPool3d((None, 2, 3)), (2, 6, 4, 5, 7)),
    "adaptive_max_pool": (lambda: nn.AdaptiveMaxPool3d((2, 3, 3)), (2, 6, 4, 5, 7)),
    "circular_pad": (lambda: nn.CircularPad2d((1, 2, 0, 3)), (2, 6, 5, 7)),
    "circular_pad_3d": (lambda: nn.CircularPad3d((1, 2, 0, 3, 1, 1)), (2, 6, 4, 5, 7)),
    "circular_conv": (lambda: nn.Conv2d(6, 4, 3, padding=1, padding_mode="circular"), (2, 6, 5, 7)),
    "circular_conv_3d": (lambda: nn.Conv3d(6, 4, (1, 3, 2), padding="same", padding_mode="circular"), (2, 6, 4, 5, 7)),
    "pixel_shuffle": (lambda: nn.PixelShuffle(2), (2, 6, 8, 5, 7)),
    "pixel_unshuffle": (lambda: nn.PixelUnshuffle(3), (2, 6, 4, 6, 9)),
    "one_tap": (lambda: nn.Conv3d(6, 4, 1), (2, 6, 4, 5, 7)),
    "one_tap_odd": (
        lambda: nn.Conv3d(6, 4, 1, stride=(1, 2, 3), dilation=2, groups=2, bias=False),
        (2, 6, 4, 5, 7),
    ),
    "one_tap_same": (lambda: nn.Conv3d(6, 4, 1, padding="same"), (2, 6, 4, 5, 7)),
    "one_tap_in_the_plane": (lambda: nn.Conv3d(6, 4, (3, 1, 1), (2, 1, 1), (1, 0, 0)), (2, 6, 4, 5, 7)),
    "transposed": (lambda: nn.ConvTranspose2d(6, 4, (5, 3), (2, 3), (2, 1), (1, 2), groups=2), (2, 6, 4, 3)),
    "transposed_3d": (lambda: nn.ConvTranspose3d(6, 4, 3, 2, 1), (1, 6, 3, 4, 3)),
}
# Layers that lose on a GPU alone, in the same form.
ON_GPU = {
    "reflection_pad": (lambda: nn.ReflectionPad2d((1, 2, 0, 3)), (2, 6, 5, 7)),
    "reflection_pad_3d": (lambda: nn.ReflectionPad3d((1, 2, 0, 3, 1, 1)), (2, 6, 4, 5, 7)),
    "replication_pad": (lambda: nn.ReplicationPad2d((1, 2, 0, 9)), (2, 6, 5, 7)),
    "replication_pad_3d": (lambda: nn.ReplicationPad3d((1, 2, 0, 3, 1, 1)), (2, 6, 4, 5, 7)),
    "nearest": (lambda: nn.Upsample(scale_factor=(2.0, 1.7)), (2, 6, 5, 7)),
    "bilinear": (lambda: nn.Upsample((9, 4), mode="bilinear", align_corners=True), (2, 6, 5, 7)),
    "trilinear": (lambda: nn.Upsample(scale_factor=2, mode="trilinear", recompute_scale_factor=True), (1, 6, 3, 5, 7)),
}


def known_subclass():
    return importlib.import_module("transformers.models.poolformer.modeling_poolformer").PoolFormerGroupNorm(6)
