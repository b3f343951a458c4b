"""All or nothing: whatever happens during a call, the model is as before, or fully converted."""

import random
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import torch_nhwc as nhwc
from torch_nhwc.converting import edits
from torch_nhwc.converting.step_guard import is_watched


class Contiguous(nn.Module):
    """A parametrization that loses the memory format, so that a last step must restore it."""

    def forward(self, weight):
        return weight.contiguous() * 2


class Scene:
    """A model with the kinds of sites that a conversion treats in ways of their own, and all that follows it."""

    def __init__(self, is_lazy=True):
        torch.manual_seed(0)
        random.seed(0)
        first, tied, computed, pruned = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))
        first.weight.data = torch.randn(3, 3, 3, 3).permute(3, 1, 0, 2)
        tied.weight = first.weight
        parametrize.register_parametrization(computed, "weight", Contiguous())
        prune.l1_unstructured(pruned, "weight", amount=5)
        self.model = nn.Sequential(first, nn.BatchNorm2d(3), nn.GroupNorm(1, 3), tied, computed, pruned)
        weights = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        self.optimizer.step()
        self.ema = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        if is_lazy:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.model.append(nn.LazyConv2d(2, 3))

    def convert(self):
        options = {"optimizer": self.optimizer, "ema": self.ema, "input_format": "channels_last", "preserve": True}
        return nhwc.convert_(self.model, **options)

    def tensors(self):
        stored = [p for p in (*self.model.parameters(), *self.model.buffers()) if not nn.parameter.is_lazy(p)]
        gradients = [p.grad for p in stored if p.grad is not None]
        state = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        return [*stored, *gradients, *state, *self.ema.values()]

    def layout(self):
        """Return what a conversion may change."""
        modules = list(self.model.named_modules())
        return [
            [tensor.stride() for tensor in self.tensors()],
            [(path, type(module).__name__) for path, module in modules],
            [
                (path, type(hook), key in module._forward_pre_hooks_with_kwargs)
                for path, module in modules
                for key, hook in module._forward_pre_hooks.items()
            ],
            [(path, type(hook)) for path, module in modules for hook in module._load_state_dict_post_hooks.values()],
            [path for path, module in modules if is_watched(module)],
        ]

    def identities(self):
        return [id(tensor) for tensor in self.tensors()]

    def pointers(self):
        return [tensor.data_ptr() for tensor in self.tensors()]

    def values(self):
        return [tensor.detach().clone() for tensor in self.tensors()]


def failing(when, error):
    """Stand in for the operator, once: raises before or after it has done its work."""
    calls = []

    def fails(*arguments, **options):
        calls.append(arguments)
        if when == "after" or len(calls) > 1:  # the second call undoes the first
            edits_operator(*arguments, **options)
        if len(calls) == 1:
            raise error("the operator fails")

    edits_operator = edits.set_strides_
    return fails


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("verb", ["convert", "revert"])
def test_h16_an_exception_at_the_operator_undoes_everything(verb, when, error, monkeypatch):
    scene = Scene()
    report = scene.convert() if verb == "revert" else None
    before, values = scene.layout(), scene.values()
    with monkeypatch.context() as patched:
        patched.setattr(edits, "set_strides_", failing(when, error))
        with pytest.raises(error, match="the operator fails"):
            report.revert() if report else scene.convert()
    assert scene.layout() == before
    assert all(map(torch.equal, scene.values(), values))
    report.revert() if report else scene.convert()
    assert scene.layout() != before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_h16_an_exception_between_two_edits_undoes_the_first(error, monkeypatch):
    def fails(*_, **__):
        raise error("the edit fails")

    scene = Scene()
    before = scene.layout()
    monkeypatch.setattr(edits, "align_when_loaded", fails)  # the last of them
    with pytest.raises(error, match="the edit fails"):
        scene.convert()
    assert scene.layout() == before


def test_a_model_that_raises_on_the_example_inputs_is_left_as_before():
    scene = Scene(is_lazy=False)
    scene.model.append(nn.Linear(3, 3))
    x = torch.randn(2, 3, 8, 8)
    before, values = scene.layout(), scene.values()
    for call in (nhwc.plan, nhwc.convert_):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            call(scene.model, example_inputs=x)
        assert scene.layout() == before
        assert all(torch.equal(a, b) for a, b in zip(scene.values(), values))


def test_h15_a_second_call_does_nothing_at_all():
    scene = Scene()
    scene.convert()
    layout, pointers, versions = scene.layout(), scene.pointers(), [tensor._version for tensor in scene.tensors()]
    hooks = [hook for module in scene.model.modules() for hook in module._forward_pre_hooks.values()]
    report = scene.convert()
    assert (scene.layout(), scene.pointers()) == (layout, pointers)
    assert [tensor._version for tensor in scene.tensors()] == versions
    assert [hook for module in scene.model.modules() for hook in module._forward_pre_hooks.values()] == hooks
    assert report.new_bytes == 0
    report.revert()  # takes back what the second call did, which is nothing
    assert (scene.layout(), scene.pointers()) == (layout, pointers)
