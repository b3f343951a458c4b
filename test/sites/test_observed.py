"""Example inputs: what reaches a convolution, as the model runs once, and that nothing of the run remains."""

import pytest
import torch
from bare_kernel import Kernel
from comparison import assert_as_it_was, assert_weights_arrive_in, layouts, quiet, state_of
from torch import nn
from torch._subclasses import FakeTensorMode
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


def test_the_model_runs_in_its_own_mode_without_gradients():
    seen, model = [], nn.Sequential(nn.Dropout(), nn.Dropout().eval())
    for module in model:
        module.register_forward_hook(lambda module, *_: seen.append((module.training, torch.is_grad_enabled())))
    nhwc.plan(model, example_inputs=X)
    assert seen == [(True, False), (False, False)]
    assert torch.is_grad_enabled()


def test_h33_a_run_inside_an_autocast_region_leaves_no_weights_without_gradient_in_its_cache():
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), Kernel())
    with torch.autocast("cpu", torch.bfloat16):
        model(X)  # fills autocast's cache
        nhwc.plan(model, example_inputs=X)
        model(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_buffers_of_torchscript_modules_are_restored():
    with quiet():
        scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)))
    model = nn.Sequential(scripted, Kernel())
    before, layout = state_of(model), layouts(model)
    nhwc.plan(model, example_inputs=X)
    assert_as_it_was(model, before, layout)


def test_models_without_values_run_as_well():
    model = nn.Sequential(Kernel(), nn.BatchNorm2d(3)).to("meta")
    assert [row.full_name for row in nhwc.plan(model, example_inputs=X.to("meta")).rows] == ["0.kernel"]
    with FakeTensorMode():
        model, x = nn.Sequential(Kernel(), nn.BatchNorm2d(3)), torch.randn(2, 3, 8, 8)
        assert [row.full_name for row in nhwc.plan(model, example_inputs=x).rows] == ["0.kernel"]


@pytest.mark.filterwarnings("ignore:Using .torch.compile")
def test_a_compiled_child_runs_uncompiled():
    model = nn.Sequential(torch.compile(Kernel(), fullgraph=True, backend=lambda *_: pytest.fail("compiled")))
    assert len(nhwc.plan(model, example_inputs=X).rows) == 1
