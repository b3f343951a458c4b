"""Where tensors lie in memory."""

import torch
from torch import Tensor, nn

from torch_nhwc.formats import Strides


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor only says what a real one would be; by the name of its class, whose module may not be loaded."""
    return "FakeTensor" in (type(tensor).__name__, type(tensor.data).__name__)


def place_of(tensor: Tensor) -> int:
    """Equal for tensors that begin at one place in memory; of the object itself where there is no memory to see."""
    has_memory = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided and not tensor.is_meta
    return (tensor.data_ptr() if has_memory else 0) or id(tensor)


def lies_as(tensor: Tensor, strides: Strides) -> bool:
    """Whether every element lies where these strides put it, whatever they are in dimensions of size 1."""
    if tensor.layout != torch.strided:  # a sparse gradient has no layout to share
        return True
    return all(size <= 1 or own == other for size, own, other in zip(tensor.shape, tensor.stride(), strides))


def with_canonical_strides(dense: Tensor) -> Tensor:
    """A dense channels-last tensor in canonical strides, which it may not have in dimensions of size 1."""
    if 1 not in dense.shape:
        return dense
    size = dense.shape
    # Of one channel, or of one voxel: fewer views do, and take less time.
    in_order = dense if dense.is_contiguous() else dense.movedim(1, -1).flatten()
    return in_order.view(size[0], *size[2:], size[1]).movedim(-1, 1)
