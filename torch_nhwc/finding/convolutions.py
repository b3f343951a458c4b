"""The one table of what convolves, by the name of its operator and of its layer; and of what passes a weight on."""

from torch import nn

# The layers whose weight has this rank. Each may have a quantized and a scripted namesake.
LAYERS: dict[int, tuple[type[nn.Module], ...]] = {
    4: (nn.Conv2d, nn.ConvTranspose2d),
    5: (nn.Conv3d, nn.ConvTranspose3d),
}
RANKS = {layer.__name__: rank for rank, layers in LAYERS.items() for layer in layers}

# The operators, with the rank of their weight; 0 where they serve all ranks, those of one dimension too, and their
# fourth argument, the stride or the padding, is as long as the kernel's dimensions. The weight is the second. The C++
# walk over graphs has the same table: include/torch_nhwc/module/graph_walk.h.
OPERATORS = {
    **dict.fromkeys(("aten::conv2d", "aten::conv_transpose2d"), 4),
    **dict.fromkeys(("aten::conv3d", "aten::conv_transpose3d", "nhwc::conv3d"), 5),
    **dict.fromkeys(("aten::convolution", "aten::_convolution", "aten::_convolution_mode"), 0),
    **dict.fromkeys(("aten::mkldnn_convolution", "prim::mkldnn_convolution"), 0),
}
# Those whose weight is held by an object.
PACKED = {
    "mkldnn_prepacked::conv2d_run": 4,
    **{f"quantized::conv2d{kind}": 4 for kind in ("", "_relu", "_add", "_add_relu", "_dynamic")},
    **{f"quantized::conv3d{kind}": 5 for kind in ("", "_relu", "_dynamic")},
    **{f"quantized::conv_transpose{rank - 2}d{kind}": rank for rank in (4, 5) for kind in ("", "_dynamic")},
}

# What gives the same weight under another name, in another dtype, as autocast does, or as a tensor that is not `None`.
PASSING_ON = {
    *("aten::alias", "aten::clone", "aten::detach", "aten::to", "aten::_to_copy"),
    *("prim::unchecked_cast", "nhwc::convert_weight"),
}
