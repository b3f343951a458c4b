"""All or nothing: whatever happens during a call, the model is as before, or fully converted."""

import gc
import importlib
import itertools
import pathlib
import random
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from selection import exhaustive
from torch import nn
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrize, prune
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import torch_nhwc
import torch_nhwc as nhwc
from torch_nhwc.stepping.guard import is_watched

PACKAGE = str(pathlib.Path(nhwc.__file__).parent)


class Contiguous(nn.Module):
    """A parametrization that loses the memory format, so that a last step must bring it back."""

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
        self.model = nn.Sequential(first, nn.BatchNorm2d(3), nn.Dropout(), tied, computed, pruned)
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
        return nhwc.convert_(self.model, optimizer=self.optimizer, ema=self.ema, input_format="channels_last")

    def tensors(self):
        stored = [p for p in (*self.model.parameters(), *self.model.buffers()) if not nn.parameter.is_lazy(p)]
        gradients = [p.grad for p in stored if p.grad is not None]
        state = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        return [*stored, *gradients, *state, *self.ema.values()]

    def layout(self):
        """What a conversion may change."""
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


def surroundings():
    """What must never change, and is not the model's."""
    return (
        len(nn_module._global_forward_pre_hooks) + len(nn_module._global_forward_hooks),
        len(_get_current_dispatch_mode_stack()),
        torch.is_grad_enabled(),
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
    )


def interrupted(function, line):
    """Calls a function, and raises KeyboardInterrupt before the given one of the lines of our package that run.

    Garbage waits meanwhile: Python lets no exception out of the callbacks of weak references, and ends tracing there.

    Returns:
        Whether so many lines ran.
    """
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            count += 1
            if count == line:
                raise KeyboardInterrupt
        return trace

    gc.disable()
    sys.settrace(trace)
    try:
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
        gc.enable()
    return False


def ends_of_interrupts(make, function, apart):
    """Interrupts a function of a scene at one line after the other, and checks that nothing is left half done.

    Args:
        make: makes a scene, and what else the function takes.
        function: takes a scene, and what came with it.
        apart: of so many lines, one is interrupted.

    Returns:
        How often the scene was as before, and how often as after the whole function.
    """
    scene, *others = make()
    function(scene, *others)
    after = scene.layout()
    ends = {"before": 0, "after": 0}
    scene = None
    for line in itertools.count(1, apart):
        if scene is None:
            scene, *others = make()
            before, values = scene.layout(), scene.values()
            identities, pointers, around = scene.identities(), scene.pointers(), surroundings()
        has_more = interrupted(lambda: function(scene, *others), line)
        assert scene.identities() == identities, line
        assert all(torch.equal(a, b) for a, b in zip(scene.values(), values)), line
        assert surroundings() == around, line
        if scene.layout() == before:
            assert scene.pointers() == pointers, line
            ends["before"] += 1
        else:
            assert scene.layout() == after, line
            ends["after"] += 1
            scene = None
        if not has_more:
            return ends


LINES_APART = pytest.mark.parametrize("apart", [5, exhaustive(1)])


@LINES_APART
def test_an_interrupt_at_any_line_of_a_conversion_leaves_the_model_as_before_or_converted(apart):
    ends = ends_of_interrupts(lambda: [Scene()], Scene.convert, apart)
    assert ends["before"] > 500 / apart
    assert ends["after"] > 10 / apart


@LINES_APART
def test_an_interrupt_at_any_line_of_reverting_leaves_the_model_converted_or_as_it_was_once(apart):
    def make():
        scene = Scene()
        return scene, scene.convert()

    ends = ends_of_interrupts(make, lambda scene, report: report.revert(), apart)
    assert ends["before"] > 500 / apart
    assert ends["after"] > 5 / apart


@LINES_APART
def test_an_interrupt_at_any_line_of_planning_with_example_inputs_leaves_everything_as_before(apart):
    x = torch.randn(2, 3, 8, 8)

    def plan(scene):
        return nhwc.plan(scene.model, example_inputs=x)

    ends = ends_of_interrupts(lambda: [Scene(is_lazy=False)], plan, apart)
    assert ends["before"] > 1000 / apart
    assert ends["after"] == 0


def test_reverting_brings_back_everything_that_a_conversion_changes():
    for is_lazy in (True, False):
        scene = Scene(is_lazy)
        layout, values, identities = scene.layout(), scene.values(), scene.identities()
        report = scene.convert()
        assert scene.layout() != layout
        report.revert()
        assert scene.layout() == layout
        assert scene.identities() == identities
        assert all(torch.equal(a, b) for a, b in zip(scene.values(), values))


def test_an_error_in_the_operator_undoes_the_edits(monkeypatch):
    def fails(*arguments, **options):
        raise RuntimeError("the operator fails")

    scene = Scene()
    report = scene.convert()
    converted, pointers = scene.layout(), scene.pointers()
    with monkeypatch.context() as patched:
        patched.setattr(torch_nhwc.converting.undoing, "lay_out_weights_", fails)
        with pytest.raises(RuntimeError, match="the operator fails"):
            report.revert()
    assert (scene.layout(), scene.pointers()) == (converted, pointers)
    report.revert()

    reverted, pointers = scene.layout(), scene.pointers()
    monkeypatch.setattr(torch_nhwc.converting.commit, "lay_out_weights_", fails)
    with pytest.raises(RuntimeError, match="the operator fails"):
        scene.convert()
    assert (scene.layout(), scene.pointers()) == (reverted, pointers)


def test_a_model_that_raises_on_the_example_inputs_is_left_as_before():
    scene = Scene(is_lazy=False)
    scene.model.append(nn.Linear(3, 3))
    x = torch.randn(2, 3, 8, 8)
    before, values, around = scene.layout(), scene.values(), surroundings()
    for call in (nhwc.plan, nhwc.convert_):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            call(scene.model, example_inputs=x)
        assert (scene.layout(), surroundings()) == (before, around)
        assert all(torch.equal(a, b) for a, b in zip(scene.values(), values))


def test_a_lack_of_memory_changes_neither_values_nor_strides():
    script = """
        import resource, torch, torch_nhwc as nhwc
        from torch import nn

        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LazyConv2d(4, 3), nn.Conv2d(800, 800, 5))
        weights = [model[0].weight, model[2].weight]
        optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        tensors = [*weights, *(w.grad for w in weights), *(optimizer.state[w]["momentum_buffer"] for w in weights)]
        before, values = [tensor.stride() for tensor in tensors], [tensor.detach().clone() for tensor in tensors]
        hooks = len(model[1]._forward_pre_hooks)
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        for storage, room in [("fresh", 20 << 20), ("fresh", 50 << 20)]:
            resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
            try:
                nhwc.convert_(model, optimizer=optimizer, storage=storage, input_format="channels_last")
            except RuntimeError as error:
                assert "allocate" in str(error), error
            else:
                raise SystemExit("there was room enough")
            assert [tensor.stride() for tensor in tensors] == before
            assert all(map(torch.equal, tensors, values))
            assert len(model[1]._forward_pre_hooks) == hooks and not model._forward_pre_hooks
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        nhwc.convert_(model, optimizer=optimizer, storage="fresh", input_format="channels_last")
        assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in tensors)
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)], check=True)


FOREIGN_MODEL = """
    import resource, signal, torch, torch_nhwc as nhwc
    from torch import nn

    def foreign_model():
        model = nn.Sequential(*(nn.Conv2d(256, 256, kernel) for kernel in (3, 1, 5, 7, 9, 3)))
        for layer in model:
            layer.weight.data = torch.from_numpy(layer.weight.detach().numpy().copy())
            layer.weight.grad = torch.randn_like(layer.weight)
        return model

    def tensors_of(model):
        return [tensor for layer in model for tensor in (layer.weight, layer.weight.grad)]

    model = foreign_model()
    weights = tensors_of(model)
    values = [tensor.clone() for tensor in weights]
    total = sum(tensor.nbytes for tensor in weights)
"""


def run_on_foreign_model(script):
    subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(FOREIGN_MODEL) + script], check=True)


def test_a_lack_of_memory_at_any_stage_leaves_values_and_strides_as_they_were():
    run_on_foreign_model(
        textwrap.dedent("""
        torch.set_num_threads(1)
        held = model[2].weight.detach()
        shared = model[5].weight.data.share_memory_().data_ptr()
        places, were_moved = [tensor.data_ptr() for tensor in weights], set()
        for room in range(0, 2 * total, 2 << 20):
            used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
            try:
                report = nhwc.convert_(model)
            except RuntimeError as error:
                assert "allocate" in str(error), error
            else:
                break
            finally:
                resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            assert all(tensor.is_contiguous() for tensor in weights)
            assert all(map(torch.equal, weights, values))
            assert model[2].weight.data_ptr() == held.data_ptr() and model[5].weight.data_ptr() == shared
            were_moved.add(sum(tensor.data_ptr() != place for tensor, place in zip(weights, places)))
        assert len(were_moved) > 1, were_moved  # it ended in several stages
        assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in weights)
        assert all(map(torch.equal, weights, values))
        """)
    )


@pytest.mark.exhaustive
def test_a_signal_at_any_time_leaves_foreign_weights_as_before_or_converted():
    run_on_foreign_model(
        textwrap.dedent("""
        import time

        def interrupt(number, frame):
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, interrupt)
        start = time.perf_counter()
        nhwc.convert_(foreign_model())
        duration = time.perf_counter() - start
        ends = set()
        for step in range(25):
            model = foreign_model()
            weights = tensors_of(model)
            values = [tensor.clone() for tensor in weights]
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-6, duration * step / 20))
                nhwc.convert_(model)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                pass
            moved = [tensor for tensor in weights if tensor.size(2) > 1]
            are_converted = {tensor.is_contiguous(memory_format=torch.channels_last) for tensor in moved}
            assert len(are_converted) == 1
            assert all(map(torch.equal, weights, values))
            ends |= are_converted
        assert ends == {False, True}
        """)
    )


@pytest.mark.parametrize("where", ["commit.lay_out_weights_", "conversion.report_of"])
def test_an_interrupt_behind_the_operators_undoes_what_they_did(where, monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    weight = model[0].weight
    tensors = [weight, weight.grad, optimizer.state[weight]["exp_avg"]]
    values = [tensor.detach().clone() for tensor in tensors]
    module, _, name = where.partition(".")
    function = getattr(importlib.import_module(f"torch_nhwc.converting.{module}"), name)

    def interrupting(*args, **options):
        monkeypatch.undo()
        function(*args, **options)
        raise KeyboardInterrupt  # as Python does when a call into C++ is over

    monkeypatch.setattr(f"torch_nhwc.converting.{where}", interrupting)
    with pytest.raises(KeyboardInterrupt):
        nhwc.convert_(model, optimizer=optimizer, preserve=True, input_format="channels_last")
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert all(map(torch.equal, tensors, values))
    assert not model._forward_pre_hooks
    assert type(model[1]) is nn.GroupNorm


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
