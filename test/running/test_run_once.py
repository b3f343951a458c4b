"""A model runs once, and nothing of the run remains."""

import pytest
import torch
from bare_kernel import Kernel
from comparison import assert_as_it_was, layouts, quiet, state_of
from torch import nn

from torch_nhwc.running import arguments_of, call, evaluation_mode, preserved_state, run_once

X = torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_model_runs_in_its_own_mode_without_gradients(training):
    seen, model = [], nn.Sequential(nn.Dropout()).train(training)
    model.register_forward_hook(lambda *_: seen.append((model.training, torch.is_grad_enabled())))
    run_once(model, X)
    assert seen == [(training, False)]
    assert torch.is_grad_enabled()


def test_h33_a_run_inside_an_autocast_region_leaves_no_weights_without_gradient_in_its_cache():
    model = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), Kernel())
    with torch.autocast("cpu", torch.bfloat16):
        model(X)  # fills autocast's cache
        run_once(model, X)
        model(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def scripted():
    return nn.Sequential(torch.jit.script(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3))), Kernel())


def test_buffers_of_torchscript_modules_are_restored():
    with quiet():
        model = scripted()
    before, layout = state_of(model), layouts(model)
    run_once(model, X)
    assert_as_it_was(model, before, layout)


def test_models_without_values_run_as_well():
    from torch._subclasses import FakeTensorMode

    assert run_once(nn.Sequential(Kernel(), nn.BatchNorm2d(3)).to("meta"), X.to("meta")).is_meta
    with FakeTensorMode():
        model, x = nn.Sequential(Kernel(), nn.BatchNorm2d(3)), torch.randn(2, 3, 8, 8)
        assert run_once(model, x).shape == (2, 3, 8, 8)


def test_a_graph_that_saved_a_buffer_can_be_used_after_a_run_that_leaves_the_buffer():
    model = nn.BatchNorm2d(3).eval()
    loss = model(X.clone().requires_grad_()).sum()
    with preserved_state(model):
        model(X)
    loss.backward()


@pytest.mark.filterwarnings("ignore:Using .torch.compile")
def test_a_compiled_child_runs_uncompiled():
    model = nn.Sequential(torch.compile(Kernel(), fullgraph=True, backend=lambda *_: pytest.fail("compiled")))
    assert run_once(model, X).shape == (2, 3, 8, 8)


def test_evaluation_mode_restores_the_mode_of_each_module():
    model = nn.Sequential(nn.Dropout().eval(), nn.Dropout())
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == [True, False, True]


class Flexible(nn.Module):
    def forward(self, x, scale=1.0, *, shift=0.0):
        return x * scale + shift


@pytest.mark.parametrize(
    "inputs",
    [torch.ones(2), (torch.ones(2),), [torch.ones(2), 1.0], {"x": torch.ones(2), "shift": 0.0}, (1, 1)],
    ids=["tensor", "tuple", "list", "dict", "numbers"],
)
def test_inputs_are_a_tensor_positional_or_named_ones(inputs):
    assert torch.as_tensor(call(Flexible(), inputs)).eq(1).all()


@pytest.mark.parametrize("shape", [(1, 3, 16, 16), [1, 3, 16, 16], torch.Size([3])], ids=["tuple", "list", "Size"])
def test_a_shape_instead_of_tensors_is_refused(shape):
    sizes = ", ".join(map(str, shape))
    with pytest.raises(TypeError, match=rf"to be tensors, got the shape \({sizes}\): give torch\.randn\({sizes}\)"):
        arguments_of(nn.Conv2d(3, 3, 3), shape)
