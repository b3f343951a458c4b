"""Drop-ins for those functions of `torch.nn.functional` that lose on channels-last, with their signatures and numbers.

A channels-last activation comes out so, and so does its gradient; anything else goes to PyTorch's own function, and so
does everything while a compiler traces, which then fuses as before.
"""

import torch_nhwc.ops  # noqa: F401  registers the operators
from torch_nhwc.functional.over_channels import cross_entropy, gelu, group_norm, instance_norm, log_softmax, softmax
from torch_nhwc.functional.over_space import (
    adaptive_avg_pool3d,
    adaptive_max_pool3d,
    avg_pool3d,
    conv3d,
    interpolate,
    lp_pool3d,
    pad,
)

__all__ = [
    "adaptive_avg_pool3d",
    "adaptive_max_pool3d",
    "avg_pool3d",
    "conv3d",
    "cross_entropy",
    "gelu",
    "group_norm",
    "instance_norm",
    "interpolate",
    "log_softmax",
    "lp_pool3d",
    "pad",
    "softmax",
]
