"""The main job on real and on small models."""

import pytest
import torch
from selection import exhaustive
from torch import nn

from torch_nhwc.cli import demo, models
from torch_nhwc.running.timing import differ


@pytest.fixture(autouse=True)
def no_cold_runs(monkeypatch):
    """Nothing here depends on times, and collecting all that tests have made takes most of a run."""
    monkeypatch.setattr(demo, "give_freed_memory_back", lambda: None)


@pytest.mark.parametrize("name", [*map(exhaustive, models.MODELS)])
def test_real_models_convert_with_unchanged_outputs(name):
    result = demo.run(models.MODELS[name](), repeats=1)
    assert result.unchanged
    assert result.weights_equal
    assert result.converted.sites > 10
    assert result.restrided.sites > 0
    assert result.kept.sites == (2 if name == "unet3d" else 0)  # filters of one channel
    assert not result.left


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_other_dtypes(dtype, device):
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 1), nn.Conv2d(8, 8, 3))
    example = models.Example("small", model, torch.randn(2, 3, 16, 16))
    result = demo.run(example.prepared(device, dtype), repeats=1)
    assert (result.converted.sites, result.restrided.sites) == (2, 1)
    assert result.unchanged
    assert result.weights_equal
    assert not result.left
    assert result.stock_over_ours == result.stock_convert_ms / result.convert_ms


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


def test_inputs_go_by_name_and_only_those_of_the_convolutions_rank_are_laid_out():
    class Clip(nn.Module):
        """Takes frames as [B, T, C, H, W], which are no volumes."""

        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 3)

        def forward(self, frames, scale):
            return self.layer(frames.view(-1, *frames.shape[2:])) * scale

    inputs = {"frames": torch.randn(2, 3, 3, 8, 8), "scale": 2.0}
    assert demo.run(models.Example("clip", Clip(), inputs), repeats=1).unchanged


@pytest.mark.parametrize(
    ("some", "others", "is_different"),
    [
        ([1.0, 1.1, 1.2, 1.1, 1.0], [1.1, 1.0, 1.2, 1.3, 1.1], False),
        ([1.0, 1.1, 1.2, 1.1, 1.0], [2.1, 2.0, 2.2, 2.3, 9.1], True),
        ([1.0, 1.0, 1.0, 1.0, 9.0], [1.01, 1.01, 1.01, 1.01, 1.01], True),
        ([1.0], [2.0], False),
    ],
)
def test_a_difference_within_the_spread_of_the_repetitions_is_none(some, others, is_different):
    assert differ(some, others) is differ(others, some) is is_different
