"""Convolutions of what PyTorch answers or refuses by itself: no elements, other devices and layouts, other settings."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import channels_last
from torch import nn

import torch_nhwc as nhwc
from torch_nhwc import functional


def converted(layer):
    model = nn.Sequential(layer)
    nhwc.convert_(model)
    return model


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_layers_without_channels_are_pytorch_s(batch):
    model = converted(nn.Conv2d(0, 3, 1))
    assert model(torch.zeros(batch, 0, 4, 4)).shape == F.conv2d(torch.zeros(batch, 0, 4, 4), model[0].weight).shape


@pytest.mark.parametrize("moves", [("weight",), ("bias",), ("weight", "bias")])
def test_a_parameter_on_another_device_is_pytorch_s(moves):
    model, stock = converted(nn.Conv2d(8, 8, 5, padding=2, groups=8)), nn.Conv2d(8, 8, 5, padding=2, groups=8)
    x = channels_last(torch.randn(2, 8, 16, 16))
    model(x)  # whose way is remembered
    for layer in (model[0], stock):
        for name in moves:
            setattr(layer, name, nn.Parameter(getattr(layer, name).to("meta")))
    for mode in (True, False):
        with torch.set_grad_enabled(mode):
            assert model(x).shape == stock(x).shape
            assert model(x).device == stock(x).device


@pytest.mark.parametrize("threads", [1, 2])
def test_a_setting_changes_what_was_remembered(threads):
    x, w = channels_last(torch.randn(2, 16, 6, 6, 6)), torch.randn(16, 16, 3, 3, 3)
    before = torch.get_num_threads()
    try:
        for enabled in (True, False, True):
            torch._C._set_mkldnn_enabled(enabled)
            for count in (threads, 1):
                torch.set_num_threads(count)
                out = functional.conv3d(x, w, padding=1)
                assert out.stride() == x.stride()
                torch.testing.assert_close(
                    out, F.conv3d(x.double(), w.double(), padding=1).float(), rtol=1e-4, atol=1e-4
                )
    finally:
        torch._C._set_mkldnn_enabled(True)
        torch.set_num_threads(before)
