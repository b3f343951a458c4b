"""A small network of every kind of site, and what a call has changed of a model."""

import torch
from torch import nn

CL, CL3D = torch.channels_last, torch.channels_last_3d


def network():
    """2D and 3D, one layer whose bytes move and one whose do not, and tensors that are no weights."""
    return nn.ModuleDict(
        {
            "first": nn.Conv2d(3, 4, 3),
            "norm": nn.BatchNorm2d(4),
            "blocks": nn.Sequential(nn.Conv2d(4, 8, 1), nn.ConvTranspose2d(8, 4, 3, groups=2)),
            "volume": nn.Conv3d(2, 3, (1, 3, 3)),
            "linear": nn.Linear(3, 3),
        }
    )


def strides(model):
    return {name: p.stride() for name, p in model.named_parameters() if p.dim() > 3}


def in_format(model):
    return {
        name: p.stride() == torch.empty(p.shape, memory_format=CL if p.dim() == 4 else CL3D, device="meta").stride()
        for name, p in model.named_parameters()
        if p.dim() > 3
    }


def snapshot(model):
    return [(name, id(t), t.data_ptr(), t.stride(), t.detach().clone()) for name, t in model.state_dict().items()]


def assert_unchanged(model, before):
    after = snapshot(model)
    assert [each[0:1] + each[2:4] for each in after] == [each[0:1] + each[2:4] for each in before]
    assert all(torch.equal(a[4], b[4]) for a, b in zip(after, before))


def refused_view():
    """Return a layer whose weight is a slice of a buffer."""
    layer = nn.Conv2d(3, 4, 3)
    layer.weight.data = torch.randn(216)[108:].view(4, 3, 3, 3)
    return layer
