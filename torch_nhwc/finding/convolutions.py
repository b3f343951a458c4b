"""The one table of what convolves, by the name of its operator and of its layer; and of what passes a weight on."""

from torch import nn

# The layers whose weight has this rank. Each has a quantized and a scripted namesake.
LAYERS: dict[int, tuple[type[nn.Module], ...]] = {
    4: (nn.Conv2d, nn.ConvTranspose2d),
    5: (nn.Conv3d, nn.ConvTranspose3d),
}
RANKS = {layer.__name__: rank for rank, layers in LAYERS.items() for layer in layers}

# The operators, with the rank of their weight, or 0 where they serve all ranks: those of layers of one dimension, too.
# All take the weight second and the stride, as long as the kernel's dimensions, fourth.
OPERATORS = {
    "aten::conv2d": 4,
    "aten::conv3d": 5,
    "aten::conv_transpose2d": 4,
    "aten::conv_transpose3d": 5,
    "aten::convolution": 0,
    "aten::_convolution": 0,
    "prim::mkldnn_convolution": 0,
}

# What gives the same weight under another name, in another dtype, as autocast does, or as a tensor that is not `None`.
PASSING_ON = {
    "aten::alias",
    "aten::clone",
    "aten::detach",
    "aten::to",
    "aten::_to_copy",
    "prim::unchecked_cast",
    "nhwc::convert_weight",
}
