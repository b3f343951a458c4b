"""The model runs once as it is, and nothing of the run remains."""

import random
import threading
from collections import UserDict

import numpy
import pytest
import torch
from bare_kernel import Kernel
from comparison import assert_as_it_was, layouts, quiet, state_of
from torch import nn
from torch.nn import functional
from torch.nn.modules import module as nn_module

import torch_nhwc as nhwc
from torch_nhwc import Reason


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


@pytest.mark.parametrize("shape", [(1, 3, 16, 16), [1, 3, 16, 16], torch.Size([3])], ids=["tuple", "list", "Size"])
def test_a_shape_instead_of_tensors_raises(shape):
    sizes = ", ".join(map(str, shape))
    with pytest.raises(TypeError, match=rf"to be tensors, got the shape \({sizes}\): give torch\.randn\({sizes}\)"):
        nhwc.plan(nn.Conv2d(3, 3, 3), example_inputs=shape)


@pytest.mark.parametrize(
    "inputs",
    [((1, 3, 16, 16),), [[1, 3, 16, 16]], (torch.Size([1, 3, 16, 16]),), {"input": (1, 3, 16, 16)}],
    ids=["tuple", "list", "Size", "dict"],
)
def test_a_shape_as_an_argument_on_which_a_model_fails_raises(inputs):
    sizes = "1, 3, 16, 16"
    with pytest.raises(
        TypeError, match=rf"to be tensors, got the shape \({sizes}\): give torch\.randn\({sizes}\)"
    ) as told:
        nhwc.plan(nn.Conv2d(3, 3, 3), example_inputs=inputs)
    assert "conv2d() received an invalid combination of arguments" in str(told.value.__cause__)


def test_a_model_may_take_a_shape_and_fail_by_itself():
    class Made(nn.Module):
        """Makes its own input."""

        def __init__(self):
            super().__init__()
            self.layer = Kernel()

        def forward(self, shape, x=None):
            return self.layer(torch.zeros(shape) if x is None else x)

    assert [row.full_name for row in nhwc.plan(Made(), example_inputs=((1, 3, 8, 8),)).rows] == ["layer.kernel"]
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 4 channels"):
        nhwc.plan(Made(), example_inputs={"shape": (8, 8), "x": torch.zeros(1, 4, 8, 8)})


def test_a_model_may_take_numbers():
    class Made(nn.Module):
        """Makes its own input."""

        def __init__(self):
            super().__init__()
            self.layer = Kernel()

        def forward(self, count, size):
            return self.layer(torch.zeros(count, 3, size, size))

    assert [row.full_name for row in nhwc.plan(Made(), example_inputs=(2, 8)).rows] == ["layer.kernel"]


def test_a_compiled_child_runs_as_it_was_before_it_was_compiled():
    model = nn.Sequential(torch.compile(Kernel(), fullgraph=True, backend="eager"))
    plan = nhwc.plan(model, example_inputs=torch.randn(1, 3, 8, 8))
    assert [row.full_name.rpartition(".")[2] for row in plan.rows] == ["kernel"]


def test_conditions_as_operators_run():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel, self.layer = Kernel(), nn.Conv2d(3, 3, 3)

        def forward(self, x):
            x = self.kernel(x)
            return torch.cond(x.sum() > 0, self.layer, lambda x: x[..., 1:-1, 1:-1] - 1, (x,))

    plan = nhwc.plan(Branches(), example_inputs=torch.randn(1, 3, 12, 12))
    assert sorted(row.full_name for row in plan.rows) == ["kernel.kernel", "layer.weight"]


def test_a_model_may_take_three_numbers():
    class Made(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Kernel()

        def forward(self, count, height, width):
            return self.layer(torch.zeros(count, 3, height, width))

    assert [row.full_name for row in nhwc.plan(Made(), example_inputs=(2, 8, 9)).rows] == ["layer.kernel"]
