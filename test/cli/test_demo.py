"""The main job on real and on small models."""

import pytest
import torch
from selection import some_of
from torch import nn

from torch_nhwc.cli import demo, models


@pytest.mark.parametrize("name", some_of(models.MODELS, "unet3d"))
def test_real_models_convert_with_unchanged_outputs(name):
    result = demo.run(models.MODELS[name](), repeats=1)
    assert result.unchanged
    assert result.weights_equal
    assert result.converted.sites > 10
    assert result.restrided.sites > 0
    assert result.kept.sites == 0
    assert not result.left
    assert result.stock_over_ours == result.stock_convert_ms / result.convert_ms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype, device):
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.Conv2d(8, 8, 3))
    result = demo.run(models.Example("small", model, torch.randn(2, 3, 16, 16)), device, dtype, repeats=1)
    assert (result.converted.sites, result.restrided.sites) == (2, 1)
    assert result.unchanged


def test_a_wrong_conversion_would_show(monkeypatch):
    def spoil(model, memory_format=None):
        with torch.no_grad():
            next(model.parameters()).add_(1)

    monkeypatch.setattr(demo, "_convert", spoil)
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    assert not demo.run(models.Example("spoilt", model, torch.randn(1, 3, 8, 8)), repeats=1).unchanged


def test_a_tied_weight_counts_once_and_the_baseline_is_contiguous():
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)).to(
        memory_format=torch.channels_last
    )
    model[1].weight = model[0].weight
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = float("nan")
    result = demo.run(models.Example("tied", model, torch.randn(1, 3, 8, 8)), repeats=1)
    assert result.converted == demo.Tally(1, 324)
    assert result.weights_equal
