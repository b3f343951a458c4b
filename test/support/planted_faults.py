"""Layers that go wrong in channels-last, for what is to find them."""

import torch
from torch import nn

CL = torch.channels_last


def is_last(x):
    return x.is_contiguous(memory_format=CL) and not x.is_contiguous()


class Scrambled(nn.Conv2d):
    """Reads a channels-last weight as if it were contiguous."""

    def forward(self, x):
        weight = self.weight
        if is_last(weight):
            weight = weight.permute(0, 2, 3, 1).reshape(weight.shape)
        return self._conv_forward(x, weight, self.bias)


class _ScrambledGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        if is_last(gradient):
            gradient = gradient.permute(0, 2, 3, 1).reshape(gradient.shape)
        return gradient * 2


class ScrambledBackward(nn.Module):
    """Doubles; the gradient is wrong in channels-last."""

    def forward(self, x):
        return _ScrambledGradient.apply(x)


class ScrambledInput(nn.Module):
    """Reads a channels-last input as if it were contiguous."""

    def forward(self, x):
        return (x.permute(0, 2, 3, 1).reshape(x.shape) if is_last(x) else x) + 1
