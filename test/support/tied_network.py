"""A small network with a tie, whose strides in channels-last are written down, and how it trains."""

import torch
from torch import nn

import torch_nhwc as nhwc


class Net(nn.Module):
    """2D and 3D, depthwise, 1x1 and one channel; a tie; a batch norm; a linear layer whose weight is transposed."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.pointwise = nn.Conv2d(6, 4, 1)
        self.block = nn.Conv2d(4, 4, 3, padding=1)
        self.tied = nn.Conv2d(4, 4, 3, padding=1)
        self.tied.weight = self.block.weight
        self.volume = nn.Conv3d(2, 3, (1, 3, 3), padding=(0, 1, 1))
        self.head = nn.Linear(3, 2)
        self.head.weight = nn.Parameter(torch.randn(3, 2).t())

    def forward(self, x):
        x = self.tied(self.block(self.pointwise(self.depthwise(self.norm(self.stem(x))).relu()))).relu()
        return self.head(self.volume(x.unflatten(1, (2, 2))).mean((2, 3, 4)))


SITES = ["stem", "depthwise", "pointwise", "block", "tied", "volume"]
LAST = {
    "stem": (18, 1, 6, 2),
    "depthwise": (9, 1, 3, 1),
    "pointwise": (6, 1, 6, 6),
    "block": (36, 1, 12, 4),
    "tied": (36, 1, 12, 4),
    "volume": (18, 1, 18, 6, 2),
}


def network(seed=0):
    torch.manual_seed(seed)
    return Net()


def converted(seed=0, **options):
    model = network(seed)
    return model, nhwc.convert_(model, **options).plan


def strides(model):
    return {name: model.get_submodule(name).weight.stride() for name in SITES}


def said(deviations):
    return [str(deviation) for deviation in deviations]


def train(model, optimizer, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(torch.randn(2, 2, 6, 6, generator=generator)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
