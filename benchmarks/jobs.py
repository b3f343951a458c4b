"""What is measured on whole models and on single weights, on the CPU and on a GPU: our ways, and those of PyTorch."""

from collections.abc import Callable

import torch
from models import weights_of
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc.layout import CHANNELS_LAST


def stock_convert(model: nn.Module) -> None:
    """Convert by PyTorch's own functions."""
    nn.utils.convert_conv2d_weight_memory_format(model, torch.channels_last)
    nn.utils.convert_conv3d_weight_memory_format(model, torch.channels_last_3d)


def ours(model: nn.Module) -> None:
    nhwc.convert_conv2d_weight_memory_format(model, torch.channels_last)
    nhwc.convert_conv3d_weight_memory_format(model, torch.channels_last_3d)


def ours_fresh(model: nn.Module) -> object:
    return nhwc.convert_weights_(weights_of(model), storage="fresh")


def module_to(model: nn.Module) -> object:
    return model.to(memory_format=CHANNELS_LAST[next(weight.dim() for weight in weights_of(model))])


JOBS: dict[str, Callable[[nn.Module], object]] = {
    "stock": stock_convert,
    "ours": ours,
    "ours fresh": ours_fresh,
    "module.to": module_to,
}


def memcpy(model: nn.Module) -> Callable[[], object]:
    """Return a copy of the same bytes to resident memory."""
    weights = weights_of(model)
    copies = [torch.zeros_like(weight) for weight in weights]
    return lambda: [copy.copy_(weight) for copy, weight in zip(copies, weights, strict=True)]
