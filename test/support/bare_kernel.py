"""Users' layers whose weights can be found only by running them, or in the graph of TorchScript."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Kernel(nn.Module):
    """A convolution on a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 3, 3, 3))

    def forward(self, x):
        return functional.conv2d(x, self.kernel, padding=1)


class Kernels(nn.Module):
    """Convolutions on parameters of its own, in a loop, in a branch, in a list, and in a method."""

    def __init__(self):
        super().__init__()
        self.looped = nn.Parameter(torch.randn(3, 3, 3, 3))
        self.branched = nn.Parameter(torch.randn(3, 3, 3, 3))
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(3, 4, 1, 3, 3))])
        self.transposed = nn.Parameter(torch.randn(3, 4, 2, 3, 3))
        self.register_buffer("blur", torch.rand(3, 1, 3, 3))
        self.table = nn.Parameter(torch.randn(1, 3, 8, 8))

    def back(self, x: Tensor, weight: Tensor) -> Tensor:
        x = functional.conv_transpose3d(x, self.transposed, padding=(0, 1, 1))
        return functional.conv3d(x, weight, padding=1)[:, :, 0]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = functional.conv2d(x, self.looped, padding=1)
        if x.shape[0] > 1:
            x = functional.conv2d(x, self.branched, padding=1) + self.table
        x = functional.conv2d(x, self.blur, groups=3, padding=1)
        return self.back(x.unsqueeze(2), self.listed[0])
