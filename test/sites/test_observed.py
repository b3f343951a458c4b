"""Example inputs: what reaches a convolution, as the model runs once."""

import pytest
import torch
from bare_kernel import Kernel
from comparison import assert_trains_alike, assert_weights_arrive_in, copied, state_of, tensors
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune

import torch_nhwc as nhwc
from torch_nhwc import Reason

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


@pytest.mark.parametrize(
    "computed",
    [parametrizations.spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", amount=0.2)],
    ids=["spectral_norm", "pruned"],
)
def test_weights_that_are_computed_in_a_known_way_are_the_same_sites_with_example_inputs(computed):
    model = nn.Sequential(computed(nn.Conv2d(3, 3, 3, padding=1)), Kernel()).double()
    x = X.double()
    model(x)
    without = nhwc.plan(model[:1]).rows
    before = state_of(model)
    plan = nhwc.plan(model, example_inputs=x)
    assert plan.rows[:-1] == without
    assert plan.rows[-1].full_name == "1.kernel"
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(model).items())
    plain = copied(model)
    nhwc.convert_(model, strict=True, plan=plan)
    assert_trains_alike(model, plain, lambda each: each(x), steps=2)


class Generated(nn.Module):
    """Computes its weight in forward and converts it itself, without a layer."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 81)

    def forward(self, x):
        weights = torch.ops.nhwc.convert_weights([self.line(torch.ones(1)).view(3, 3, 3, 3)])
        return functional.conv2d(x, weights[0], padding=1)


def test_a_computed_weight_that_the_model_converts_itself_is_no_site():
    model = nn.Sequential(Generated(), nn.Conv2d(3, 3, 3))
    assert [(row.full_name, row.reason) for row in nhwc.plan(model, example_inputs=X).rows] == [("1.weight", None)]
    nhwc.convert_(model, example_inputs=X, strict=True)
    assert_weights_arrive_in(None, model, X)


class Chosen(nn.Module):
    """One of its weights is chosen by the input."""

    def __init__(self):
        super().__init__()
        self.few, self.many = (nn.Parameter(torch.randn(3, 3, 3, 3)) for _ in range(2))

    def forward(self, x):
        weight = self.many if x.shape[0] > 1 else self.few
        return functional.conv2d(x, weight, padding=1)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_what_a_graph_does_not_show_is_seen_by_running_it():
    model = nn.Sequential(torch.jit.script(nn.Sequential(Chosen())))
    assert [row.reason for row in nhwc.plan(model).rows] == [Reason.ON_THE_FLY]
    plan = nhwc.plan(model, example_inputs=X)
    assert [(row.full_name, row.layer) for row in plan.rows[1:]] == [("0.0.many", "Chosen")]
    with pytest.warns(UserWarning, match="1 of 2 sites stay as they are"):
        nhwc.convert_(nn.Sequential(torch.jit.script(nn.Sequential(Chosen()))), plan=plan)


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
