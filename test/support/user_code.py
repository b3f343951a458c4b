"""Modules like the code of a model."""

import threading

import torch
from torch import nn
from torch.nn import functional


class Function(nn.Module):
    """The user's own code."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Doubled(torch.autograd.Function):
    """An autograd function, which takes tensors without asking them."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class Locked(nn.Module):
    """A parametrization that cannot be copied, and so not evaluated on copies."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, weight):
        return weight * 2


class Standardised(nn.Conv2d):
    """Computes its weight in forward, as ResNet-v2 of Big Transfer does."""

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return functional.conv2d(x, weight / weight.std((1, 2, 3), keepdim=True), self.bias)


def not_a_leaf():
    """Return a layer whose weight is computed from another tensor."""
    layer = nn.Conv2d(3, 4, 3)
    weight = layer.weight * 2
    del layer.weight
    layer.weight = weight
    return layer
