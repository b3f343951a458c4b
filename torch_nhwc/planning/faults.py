"""What PyTorch computes wrong in layers that stay as they are, or that a conversion makes wrong."""

from typing import Any

from torch import nn

from torch_nhwc.nn.replacements import is_preserving
from torch_nhwc.sites.finding import MEASURED_DEVICES, is_layer
from torch_nhwc.sites.reasons import Reason
from torch_nhwc.sites.site import Site

# Layers other than convolutions.
FAULTY: dict[Reason, tuple[type, ...]] = {
    Reason.INSTANCE_NORM: (nn.InstanceNorm2d, nn.InstanceNorm3d),
    Reason.GROUP_NORM: (nn.GroupNorm,),
    Reason.PIXEL_SHUFFLE: (nn.PixelShuffle, nn.PixelUnshuffle),
}


def loses_gradient(layer: Any) -> bool:
    """Return whether a layer that trains may get a wrong weight gradient because its weight is channels-last.

    This is so for 2D convolutions of 1x1 with a stride and few channels in a group, on some CPUs.
    """
    if not layer.training or getattr(layer, "kernel_size", None) != (1, 1) or layer.stride == (1, 1):
        return False
    if (layer.out_channels if layer.transposed else layer.in_channels) // layer.groups >= 16:
        return False
    # A parametrized weight would be computed if it were read.
    return any(parameter.requires_grad for name, parameter in layer.named_parameters() if name != "bias")


def is_slow_depthwise_volume(site: Site) -> bool:
    """Return whether a weight is that of a depthwise 3D convolution on a GPU, which cuDNN computes slowly."""
    tensor = site.tensor
    if tensor is None or site.rank != 5 or tensor.device.type != "cuda" or getattr(site.module, "transposed", False):
        return False
    return site.groups > 1 and tensor.shape[1:2] == (1,)


def may_be_wrong_on_one_channel(site: Site) -> bool:
    """Return whether a convolution of one group takes one channel and strides over its width, if that is known."""
    strides = getattr(site.module, "stride", None)
    if isinstance(strides, tuple) and strides[-1:] == (1,):
        return False
    if site.tensor is None:
        return True
    channels = getattr(site.module, "in_channels", None)  # a computed weight may come from tensors of other shapes
    has_one = site.tensor.shape[1:2] == (1,) if channels is None else channels == 1
    return bool(has_one) and site.groups <= 1


def may_get_wrong_gradient(site: Site) -> bool:
    """Return whether a weight of a layer of PyTorch's may get a gradient on a CPU, in this mode or the other."""
    if is_preserving(type(site.module)) or not is_layer(site.module):
        return False
    return site.tensor is None or (site.tensor.requires_grad and site.tensor.device.type in MEASURED_DEVICES)
