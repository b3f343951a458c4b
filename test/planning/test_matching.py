"""A model that differs from a plan is refused, and nothing in it changes."""

import pytest
import torch
from snapshots import assert_unchanged, snapshot
from torch import nn

import torch_nhwc as nhwc

CALLS = {
    "check": lambda model, report: nhwc.check(model, report.plan),
    "restore_": lambda model, report: nhwc.training.restore_(model, report.plan),
    "convert_": lambda model, report: nhwc.convert_(model, plan=report.plan),
    "revert": lambda model, report: report.revert(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm], ids=["new", "old"])
@pytest.mark.filterwarnings("ignore:.torch.nn.utils.spectral_norm")
def test_a_spectral_norm_that_was_added_later_makes_no_power_iteration(norm, call):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    report = nhwc.convert_(model, optimizer=())
    norm(model[1])
    before, generator = snapshot(model), torch.get_rng_state()
    with pytest.raises(ValueError, match=r"the model differs from the plan: it has no '1\.weight'"):
        CALLS[call](model, report)
    assert_unchanged(model, before)
    assert torch.equal(torch.get_rng_state(), generator)
