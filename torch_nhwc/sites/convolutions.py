"""The table of convolutions, by layer and by operator, and of the operators that pass a weight on."""

from torch import nn

# The layers whose weight has this rank. Each may have a quantized and a scripted namesake.
LAYERS: dict[int, tuple[type[nn.Module], ...]] = {
    4: (nn.Conv2d, nn.ConvTranspose2d),
    5: (nn.Conv3d, nn.ConvTranspose3d),
}
RANKS = {layer.__name__: rank for rank, layers in LAYERS.items() for layer in layers}

# The operators, with the rank of their weight, which is their second argument. 0 means any rank, 1D convolutions too:
# their fourth argument (the stride or the padding) has as many elements as the kernel has dimensions.
OPERATORS = {
    **dict.fromkeys(("aten::conv2d", "aten::conv_transpose2d"), 4),
    **dict.fromkeys(("aten::conv3d", "aten::conv_transpose3d", "nhwc::conv3d"), 5),
    **dict.fromkeys(("aten::convolution", "aten::_convolution", "aten::_convolution_mode"), 0),
    **dict.fromkeys(("aten::mkldnn_convolution", "prim::mkldnn_convolution"), 0),
}

# The operators whose result is the same weight: another name for it, another dtype (autocast), or one known not to be
# `None`.
PASSING_ON = {
    *("aten::alias", "aten::clone", "aten::detach", "aten::to", "aten::_to_copy"),
    *("prim::unchecked_cast", "nhwc::convert_weight"),
}
