"""Carry a plan out, all or nothing, and undo it: the verbs that change models.

What is to change is decided in `planning`; looking after a model that was converted belongs to `training`.
"""

from torch_nhwc.converting.conversion import channels_last, convert_
from torch_nhwc.converting.dropin import convert_conv2d_weight_memory_format, convert_conv3d_weight_memory_format
from torch_nhwc.converting.report import Report

__all__ = [
    "Report",
    "channels_last",
    "convert_",
    "convert_conv2d_weight_memory_format",
    "convert_conv3d_weight_memory_format",
]
