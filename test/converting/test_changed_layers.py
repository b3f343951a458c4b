"""Layers that are no longer what they were when they were exchanged, or kept: the way back, `check` and `restore_`."""

import pytest
import torch
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import Reason
from torch_nhwc.nn.replacements import is_preserving
from torch_nhwc.planning import Action


def lazy_convolution():
    return nn.Sequential(nn.Conv3d(3, 4, 1), nn.GELU(), nn.LazyConv3d(4, 1)), torch.randn(1, 3, 4, 4, 4)


def lazy_norm():
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.LazyInstanceNorm2d(affine=True), nn.GELU()), torch.randn(1, 3, 4, 4)


@pytest.mark.parametrize("make", [lazy_convolution, lazy_norm])
def test_lazy_layers_are_kept_and_in_nobody_s_way(make):
    model, x = make()
    with nhwc.channels_last(model, preserve=True) as report:
        (lazy,) = (row for row in report.plan.layers if row.reason is Reason.LAZY_LAYER)
        assert lazy.action is Action.KEEP
        model(x)
        assert type(model[int(lazy.path)]).__name__ == lazy.layer
        assert not nhwc.check(model, report.plan)
        nhwc.training.restore_(model, report.plan)
        assert [row.action for row in nhwc.plan(model, preserve=True).layers if row.path == lazy.path] == ["exchange"]
    assert not any(is_preserving(type(layer)) for layer in model)


def test_an_exchanged_layer_is_found_whatever_its_arguments_are_by_now():
    model = nn.Sequential(nn.Conv3d(3, 4, 3), nn.Upsample(scale_factor=2))
    report = nhwc.convert_(model, preserve=True)
    model[1].mode = "trilinear"
    assert not nhwc.check(model, report.plan)
    assert [row.reason for row in nhwc.plan(model, preserve=True).layers] == [Reason.EXCHANGED]
    report.revert()
    assert type(model[1]) is nn.Upsample


def test_what_is_there_no_longer_is_skipped_on_the_way_back():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.GroupNorm(2, 4))
    report = nhwc.convert_(model, preserve=True)
    model[1] = nn.Identity()
    report.revert()
    assert type(model[2]) is nn.GroupNorm
    assert model[0].weight.is_contiguous()
