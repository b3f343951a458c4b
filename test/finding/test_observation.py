"""Example inputs: the model runs once as it is, and nothing of the run remains."""

import copy
import random
import threading
from collections import UserDict

import numpy
import pytest
import torch
from comparison import assert_trains_alike, assert_weights_arrive_in, copied, layouts, quiet, tensors
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrizations, prune

import torch_nhwc as nhwc
from torch_nhwc import Reason


class Kernel(nn.Module):
    """A convolution on a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 3, 3, 3))

    def forward(self, x):
        return functional.conv2d(x, self.kernel, padding=1)


class Restless(nn.Module):
    """Changes whatever a forward can change, and keeps a note of how it ran."""

    def __init__(self):
        super().__init__()
        self.layer = Kernel()
        self.norm = nn.BatchNorm2d(3)
        self.register_buffer("count", torch.zeros(2), persistent=False)
        self.register_buffer("not_yet", None)
        self.runs = []

    def forward(self, x):
        self.runs.append((self.training, torch.is_grad_enabled()))
        torch.rand(3), random.random(), numpy.random.rand()
        self.count += 1
        self.not_yet = torch.ones(2)
        self.register_buffer("another", torch.ones(3))
        return self.norm(self.layer(x))


def state_of(model):
    return {name: tensor.clone() for name, tensor in tensors(model).items()}


def assert_as_it_was(model, before, layout):
    assert list(tensors(model)) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(model).items())
    assert layouts(model) == layout


def global_hooks():
    return len(nn_module._global_forward_pre_hooks), len(nn_module._global_forward_hooks)


def generators():
    return torch.rand(2).tolist(), random.random(), numpy.random.rand()


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_model_runs_in_its_own_mode_without_gradients_and_stays_as_it_was(training):
    model, x = Restless().train(training), torch.randn(2, 3, 8, 8)
    before, layout, hooks = state_of(model), layouts(model), global_hooks()

    def seed():
        torch.manual_seed(1), random.seed(1), numpy.random.seed(1)

    seed()
    expected = generators()
    seed()
    plan = nhwc.plan(model, example_inputs=x)
    assert generators() == expected
    assert [row.full_name for row in plan.rows] == ["layer.kernel"]
    assert model.runs == [(training, False)]
    assert model.training is training
    assert model.not_yet is None
    assert_as_it_was(model, before, layout)
    assert global_hooks() == hooks
    assert torch.is_grad_enabled()


class Raising(Restless):
    """Raises at its end."""

    def forward(self, x):
        super().forward(x)
        raise KeyError("no such thing")


@pytest.mark.parametrize("verb", [nhwc.plan, nhwc.convert_])
def test_a_model_that_raises_changes_nothing(verb):
    model = Raising()
    before, layout, hooks, state = state_of(model), layouts(model), global_hooks(), torch.get_rng_state()
    with pytest.raises(KeyError, match="no such thing"):
        verb(model, example_inputs=torch.randn(2, 3, 8, 8, generator=torch.Generator()))
    assert_as_it_was(model, before, layout)
    assert global_hooks() == hooks
    assert torch.equal(torch.get_rng_state(), state)


class Flexible(Kernel):
    """Takes its input in several ways."""

    def forward(self, x, scale=1.0, *, shift=0.0):
        return super().forward(x * scale + shift)


X = torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize(
    "example_inputs",
    [X, (X,), [X], (X, 2.0), {"x": X}, {"x": X, "shift": 1.0}, UserDict(x=X, scale=2.0)],
    ids=["tensor", "tuple", "list", "two", "dict", "keywords", "mapping"],
)
def test_inputs_are_a_tensor_positional_or_named_ones(example_inputs):
    assert [row.full_name for row in nhwc.plan(Flexible(), example_inputs=example_inputs).rows] == ["kernel"]


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


def test_h33_planning_inside_an_autocast_region_leaves_no_weights_without_gradient_behind():
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), Kernel())
    with torch.autocast("cpu", torch.bfloat16):
        model(X)  # fills autocast's cache
        plan = nhwc.plan(model, example_inputs=X)
        model(X).sum().backward()
    assert [row.full_name for row in plan.rows] == ["0.weight", "1.kernel"]
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_lazy_layers_and_example_inputs_together_are_refused():
    model = nn.Sequential(nn.LazyConv2d(3, 3))
    with pytest.raises(ValueError, match=r"would materialise the lazy layer '0' \(LazyConv2d\): run the model once"):
        nhwc.convert_(model, example_inputs=X)
    assert isinstance(model[0], nn.LazyConv2d)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("compiler", [torch.jit.script, lambda module: torch.jit.trace(module, X)])
def test_torchscript_children_run_too(compiler):
    scripted = compiler(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)))
    model = nn.Sequential(scripted, Kernel())
    before, layout = state_of(model), layouts(model)
    plan = nhwc.plan(model, example_inputs=X)
    assert [row.full_name for row in plan.rows] == ["0.0.weight", "1.kernel"]
    assert {row.reason for row in plan.rows} == {None}
    assert_as_it_was(model, before, layout)


def old_weight_norm(layer):
    with quiet():
        return nn.utils.weight_norm(layer)


@pytest.mark.parametrize(
    "computed",
    [
        parametrizations.weight_norm,
        parametrizations.spectral_norm,
        old_weight_norm,
        nn.utils.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", amount=0.2),
    ],
    ids=["weight_norm", "spectral_norm", "old_weight_norm", "old_spectral_norm", "pruned"],
)
@pytest.mark.parametrize("has_run", [False, True])
def test_weights_that_are_computed_in_a_known_way_are_the_sites_that_they_are_without_example_inputs(computed, has_run):
    model = nn.Sequential(computed(nn.Conv2d(3, 3, 3, padding=1)), Kernel()).double()
    x = X.double()
    if has_run:
        model(x)
    without = nhwc.plan(model[:1]).rows
    before = state_of(model)
    plan = nhwc.plan(model, example_inputs=x)
    assert plan.rows[:-1] == without
    assert plan.rows[-1].full_name == "1.kernel"
    assert all(torch.equal(tensor, before[name]) for name, tensor in tensors(model).items())
    plain = copied(model)
    plan.apply(model, strict=True)
    assert_trains_alike(model, plain, lambda each: each(x), steps=2)


class Standardised(nn.Conv2d):
    """Follows the advice: lays its computed weight out itself."""

    def forward(self, x):
        weight = nhwc.convert_weight(self.weight - self.weight.mean((1, 2, 3), keepdim=True))
        return self._conv_forward(x, weight, self.bias)


class Generated(nn.Module):
    """The same, without a layer."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 81)

    def forward(self, x):
        weights = torch.ops.nhwc.convert_weights([self.line(torch.ones(1)).view(3, 3, 3, 3)])
        return functional.conv2d(x, weights[0], padding=1)


def test_a_computed_weight_that_is_laid_out_where_it_is_computed_is_nothing_to_speak_of():
    model = nn.Sequential(Generated(), Standardised(3, 3, 3))
    assert [(row.full_name, row.reason) for row in nhwc.plan(model, example_inputs=X).rows] == [("1.weight", None)]
    nhwc.convert_(model, example_inputs=X, strict=True)
    assert_weights_arrive_in(None, model, X)


class Meeting(nn.Module):
    """Says that it runs, and waits for another."""

    def __init__(self, mine, others):
        super().__init__()
        self.mine, self.others = mine, others

    def forward(self, x):
        self.mine.set()
        assert self.others.wait(60)
        return x


class Made(Meeting):
    """Makes its weight itself, after the meeting."""

    def forward(self, x):
        super().forward(x)
        return functional.conv2d(x, x.mean(0)[None, :, :3, :3])


def test_a_model_that_another_thread_runs_meanwhile_is_not_mixed_up_with_it():
    planning, running, planned = (threading.Event() for _ in range(3))

    def run():
        assert planning.wait(60)
        nn.Sequential(Meeting(running, planned))(X)

    other = threading.Thread(target=run)
    other.start()
    plan = nhwc.plan(nn.Sequential(Made(planning, running)), example_inputs=X)
    planned.set()
    other.join()
    assert [(row.full_name, row.layer) for row in plan.rows] == [("0.<computed>", "Made")]


class Sliced(nn.Conv2d):
    """Uses the first of its filters, as slimmable networks do."""

    def forward(self, x):
        return functional.conv2d(x, self.weight[:2], self.bias[:2])


def test_a_part_of_a_weight_is_computed_from_it():
    plan = nhwc.plan(Sliced(3, 4, 3), example_inputs=X)
    assert [(row.name, row.reason) for row in plan.rows] == [("weight", Reason.COMPUTED_IN_FORWARD)]


class Chosen(nn.Module):
    """One of its weights is chosen by the input."""

    def __init__(self):
        super().__init__()
        self.few, self.many = (nn.Parameter(torch.randn(3, 3, 3, 3)) for _ in range(2))

    def forward(self, x):
        weight = self.many if x.shape[0] > 1 else self.few
        return functional.conv2d(x, weight, padding=1)


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_what_a_graph_does_not_tell_is_seen_by_running_it():
    model = nn.Sequential(torch.jit.script(nn.Sequential(Chosen())))
    assert [row.reason for row in nhwc.plan(model).rows] == [Reason.ON_THE_FLY]
    plan = nhwc.plan(model, example_inputs=X)
    assert [(row.full_name, row.layer) for row in plan.rows[1:]] == [("0.0.many", "Chosen")]
    with pytest.warns(UserWarning, match="1 of 2 sites stay as they are"):
        plan.apply(nn.Sequential(torch.jit.script(nn.Sequential(Chosen()))))


def test_observers_of_quantization_have_their_size_again():
    from torch.ao import quantization

    with quiet():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
        model.qconfig = quantization.get_default_qat_qconfig("x86")
        model = quantization.prepare_qat(quantization.fuse_modules_qat(model, ["0", "1", "2"]))
    before, layout = state_of(model), layouts(model)
    plan = nhwc.plan(model, example_inputs=X)
    assert [(row.full_name, row.reason) for row in plan.rows] == [("0.weight", Reason.COMPUTED_IN_FORWARD)]
    assert_as_it_was(model, before, layout)


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


def test_a_plan_made_with_example_inputs_applies_to_another_instance():
    first, second = (nn.Sequential(Kernel(), nn.Conv2d(3, 3, 3)) for _ in range(2))
    plan = nhwc.Plan.from_json(nhwc.plan(first, example_inputs=X).to_json())
    plain = copy.deepcopy(second)
    report = plan.apply(second, strict=True)
    assert_weights_arrive_in(None, second, X)
    report.revert()
    assert [p.stride() for p in second.parameters()] == [p.stride() for p in plain.parameters()]


def test_a_model_on_the_meta_device_runs_as_well():
    model = nn.Sequential(Kernel(), nn.BatchNorm2d(3)).to("meta")
    plan = nhwc.plan(model, example_inputs=X.to("meta"))
    assert [(row.full_name, row.reason) for row in plan.rows] == [("0.kernel", Reason.META)]


def test_a_fake_model_runs_as_well():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        model = nn.Sequential(Kernel(), nn.BatchNorm2d(3))
        plan = nhwc.plan(model, example_inputs=torch.randn(2, 3, 8, 8))
    assert [(row.full_name, row.reason) for row in plan.rows] == [("0.kernel", Reason.FAKE)]


def test_activations_are_not_kept_alive_by_the_watch():
    import gc
    import weakref

    class Watched(nn.Module):
        def forward(self, x):
            alive.append(sum(reference() is not None for reference in seen))
            y = x.clone()
            seen.append(weakref.ref(y))
            return y

    alive, seen = [], []
    gc.disable()
    try:
        nhwc.plan(nn.Sequential(*(Watched() for _ in range(6))), example_inputs=X)
    finally:
        gc.enable()
    assert max(alive) <= 1
