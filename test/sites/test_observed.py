"""Example inputs: what reaches a convolution, as the model runs once."""

import pytest
import torch
from bare_kernel import Kernel
from comparison import assert_weights_arrive_in
from torch import nn
from torch.nn import functional

import torch_nhwc as nhwc

X = torch.randn(2, 3, 8, 8)


class Autocast(Kernel):
    """Casts its weight by autocast, or by itself."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, x):
        if self.inside == "to":
            return functional.conv2d(x.bfloat16(), self.kernel.to(torch.bfloat16))
        with torch.autocast("cpu", torch.bfloat16, enabled=self.inside == "autocast"):
            return super().forward(x)


@pytest.mark.parametrize("inside", ["autocast", "to"])
def test_a_weight_that_is_cast_on_its_way_is_recognised(inside):
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), Autocast(inside))
    assert [row.full_name for row in nhwc.plan(model, example_inputs=X).rows] == ["0.weight", "1.kernel"]
    nhwc.convert_(model, example_inputs=X, strict=True)
    assert_weights_arrive_in(None, nn.Sequential(model[0]), X)


class Stored(nn.Module):
    """Keeps its weight as a plain attribute, on two paths."""

    def __init__(self):
        super().__init__()
        self.filters = torch.randn(3, 1, 3, 3, 3)
        self.again = self.filters

    def forward(self, x):
        return functional.conv3d(x.unsqueeze(2), self.filters, groups=3, padding=1).squeeze(2)


def test_a_plain_attribute_that_reaches_a_convolution_is_a_site():
    model = nn.Sequential(Stored())
    report = nhwc.convert_(model, example_inputs=X, strict=True)
    assert [(row.full_name, row.groups) for row in report.plan.rows] == [("0.filters", 3)]
    assert model[0].filters.stride() == (27, 1, 9, 3, 1)
    assert model[0].again is model[0].filters


def test_a_weight_that_the_run_does_not_reach_is_a_site_all_the_same():
    model = nn.ModuleDict({"used": Kernel(), "unused": nn.Conv2d(3, 3, 3)})
    model.forward = model["used"].forward
    assert [row.full_name for row in nhwc.plan(model, example_inputs=X).rows] == ["unused.weight", "used.kernel"]
