"""What a trace leaves unchanged, whatever happens in its block, and how little memory it takes."""

import copy
import gc
import threading

import pytest
import torch
from activations import channels_last
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from user_code import Function

import torch_nhwc as nhwc
from torch_nhwc.tracing import recorder


class Stop(BaseException):
    """An interrupt, as KeyboardInterrupt is: PyTorch does not call hooks after it."""


class Raising(nn.Module):
    error = None

    def forward(self, x):
        if self.error is not None:
            raise self.error
        return x


@pytest.fixture
def model():
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Raising(), nn.Dropout(), nn.Softmax2d()]
    return nn.Sequential(*layers, nn.Conv2d(8, 8, 3)).to(memory_format=torch.channels_last)


@pytest.fixture
def x():
    return channels_last(torch.randn(2, 3, 8, 8))


@pytest.fixture(autouse=True)
def _nothing_stays():
    yield
    assert not nn_module._global_forward_hooks
    assert not nn_module._global_forward_pre_hooks
    assert not nn_module._global_forward_hooks_always_called
    assert not nn_module._global_forward_hooks_with_kwargs
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.parametrize("run", [lambda model, x: model(x), lambda model, x: checkpoint(model, x, use_reentrant=False)])
def test_numbers_buffers_and_random_state_are_those_without_a_trace(model, x, run):
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = step(run, other, x)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    with nhwc.trace(model):
        seen = step(run, model, x)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert attributes == {name: set(vars(module)) for name, module in model.named_modules()}
    assert [p.stride() for p in model.parameters()] == [p.stride() for p in other.parameters()]


def step(run, model, x):
    out = run(model, x)
    out.square().mean().backward()
    return out.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt(), Stop()])
def test_an_exception_leaves_no_hook_and_keeps_the_trace(model, x, error):
    model[2].error = error
    with pytest.raises(type(error)) as raised, nhwc.trace(model) as trace:
        model(x)
    assert raised.value is error
    assert trace.operators["forward"] > 2  # a convolution, and a batch norm that counts its batches
    assert [module.path for module in trace.modules] == ["0", "1"]


def test_a_module_that_raised_is_not_running(model, x):
    with nhwc.trace(model) as trace:
        model[2].error = ValueError("wrong")
        with pytest.raises(ValueError, match="wrong"):
            model(x)
        model[2].error = None
        model(x)
        torch.softmax(x, 1)
    assert [loss.path for loss in trace.losses] == ["4", ""]


def test_a_module_from_elsewhere_has_the_path_of_its_caller(x):
    elsewhere = nn.Softmax2d()
    model = nn.Sequential(nn.Identity(), Function(lambda x: elsewhere(x)))
    with nhwc.trace(model) as trace:
        model(x)
    assert [loss.path for loss in trace.losses] == ["1"]


def test_other_threads_are_not_seen(model, x):
    with nhwc.trace(model) as trace:
        thread = threading.Thread(target=nn.Sequential(nn.Softmax2d()), args=(x,))
        thread.start()
        thread.join()
    assert trace.operators == {"forward": 0, "backward": 0}
    assert not trace.modules


def test_traces_nest(model, x):
    with nhwc.trace(model) as outer, nhwc.trace(model[4]) as inner:
        model(x)
    assert [loss.path for loss in outer.losses] == ["4"]
    assert [loss.path for loss in inner.losses] == [""]
    assert inner.operators == outer.operators


def test_a_trace_is_filled_in_its_block_and_final_after_it(model, x):
    with nhwc.trace(model) as trace:
        model(x)
        assert [loss.path for loss in trace.losses] == ["4"]
        assert len(trace.modules) == 7
    text = trace.to_json()
    model(x)
    assert trace.to_json() == text
    assert not [each for each in gc.get_referrers(model) if each is trace]


def test_neither_rows_nor_memory_grow_with_steps(model, monkeypatch):
    monkeypatch.setattr(recorder, "_MOST", 20)
    with nhwc.trace(model) as trace:
        for size in range(8, 28):
            x = channels_last(torch.randn(2, 3, size, 8))
            model(x).square().sum().backward()
        gc.collect()
        assert sum(type(each) is recorder.CallSite for each in gc.get_objects()) <= 42
    (loss,) = (row for row in trace.losses if row.phase == "forward")
    assert (loss.count, loss.inputs[0].shape) == (20, (2, 8, 6, 6))
    assert {row.path for row in trace.losses} <= {"4", "5"}


def test_what_replaced_layers_restore_is_one_row_in_any_number_of_steps():
    model = nn.Sequential(nn.Conv3d(3, 32, 3, padding=1), nn.ConvTranspose3d(32, 16, 2, stride=2))
    nhwc.convert_(model, input_format="channels_last")
    with nhwc.trace(model) as trace:
        for step in range(3):
            model(torch.randn(1, 3, 4, 4, 4)).sum().backward()
            assert {row.count for row in trace.restored} <= {step, step + 1}
    assert {row.count for row in trace.restored} == {3}
    assert not trace.losses


@pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:Using `torch.compile")
def test_what_cannot_be_seen_is_listed(x):
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Softmax2d()))
    branches = Function(lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)))
    compiled = torch.compile(nn.Sequential(Function(lambda x: x.contiguous() * 2)), backend="eager")
    model = nn.Sequential(scripted.to(memory_format=torch.channels_last), nn.ReLU(), compiled, branches)
    model[1].compile(backend="eager")
    with nhwc.trace(model) as trace:
        model(x)
        torch.softmax(x, 1)
    assert [(row.path, row.why[:14]) for row in trace.unseen] == [
        ("0", "a TorchScript "),
        ("1", "it is compiled"),
        ("2", "it is compiled"),
        ("3", "what cond runs"),
    ]
    assert [(loss.path, loss.operator) for loss in trace.losses] == [("0", "aten::_softmax"), ("", "aten::_softmax")]
    assert "not seen: 0: a TorchScript module" in str(trace)
