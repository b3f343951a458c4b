"""What a trace leaves as it was, whatever happens in its block, and how little memory it takes."""

import copy
import gc
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from activations import channels_last
from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from user_code import Function

import torch_nhwc as nhwc


class Stop(BaseException):
    """As a KeyboardInterrupt is, none of the exceptions that hooks of PyTorch are told of."""


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


def hooks():
    return [
        len(each)
        for each in (
            nn_module._global_forward_hooks,
            nn_module._global_forward_pre_hooks,
            nn_module._global_forward_hooks_always_called,
            nn_module._global_forward_hooks_with_kwargs,
        )
    ] + [nn.Module.__call__, threading.Thread.start, ThreadPoolExecutor.submit]


@pytest.fixture(autouse=True)
def _nothing_stays():
    before = hooks()
    yield
    assert hooks() == before
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
def test_an_exception_goes_through_and_the_trace_stays(model, x, error):
    model[2].error = error
    with pytest.raises(type(error)) as raised, nhwc.trace(model) as trace:
        model(x)
    assert raised.value is error
    assert trace.operators["forward"] > 2  # a convolution, and a batch norm that counts its batches
    assert [module.path for module in trace.modules] == ["0", "1"]


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt(), Stop()])
def test_an_exception_in_the_block_leaves_no_module_behind(model, x, error):
    with nhwc.trace(model) as trace:
        model[2].error = error
        with pytest.raises(type(error)):
            model(x)
        model[2].error = None
        model(x)
        torch.softmax(channels_last(torch.randn(2, 3, 4, 4)), 1)
    assert [loss.path for loss in trace.losses] == ["4", ""]


@pytest.mark.parametrize("error", [ValueError("wrong"), KeyboardInterrupt(), Stop()])
def test_an_exception_in_a_thread_leaves_nothing_behind(model, x, error):
    model[2].error = error
    with ThreadPoolExecutor(1) as pool:
        with nhwc.trace(model) as trace:
            assert pool.submit(model, x).exception() is error
        assert pool.submit(_get_current_dispatch_mode_stack).result() == []
    assert trace.operators["forward"] > 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Stop()])
def test_what_comes_behind_an_interrupt_has_its_own_path(model, x, error):
    model[2].error = error
    with nhwc.trace(model) as trace:
        with pytest.raises(type(error)):
            model(x)
        torch.softmax(x, 1)
    assert [loss.path for loss in trace.losses] == [""]


def test_an_exception_in_a_backward_leaves_nothing_behind(model, x):
    def fail(gradient):
        raise ValueError("wrong")

    with nhwc.trace(model):
        out = model(x)
        out.register_hook(fail)
        with pytest.raises(ValueError, match="wrong"):
            out.sum().backward()


def test_a_thread_that_outlives_the_block_is_left_alone(model, x):
    entered, over = threading.Event(), threading.Event()
    stacks = []

    def wait(module, arguments):
        entered.set()
        over.wait()

    def work():
        model(x).sum().backward()
        stacks.append(_get_current_dispatch_mode_stack())

    handle = model[0].register_forward_pre_hook(wait)
    thread = threading.Thread(target=work)
    with nhwc.trace(model) as trace:
        thread.start()
        entered.wait()
    seen = trace.to_json()
    over.set()
    thread.join()
    handle.remove()
    assert stacks == [[]]
    assert trace.to_json() == seen


def test_other_models_and_threads_are_not_looked_at(model, x):
    other = nn.Softmax2d()
    with nhwc.trace(model) as trace:
        thread = threading.Thread(target=other, args=(x,))
        thread.start()
        thread.join()
    assert trace.operators == {"forward": 0, "backward": 0}


def test_traces_nest(model, x):
    with nhwc.trace(model) as outer, nhwc.trace(model[4]) as inner:
        model(x)
    assert [loss.path for loss in outer.losses] == ["4"]
    assert [loss.path for loss in inner.losses] == [""]
    assert inner.operators == outer.operators


def test_traces_may_end_in_any_order(model, x):
    first, second = nhwc.trace(model), nhwc.trace(model)
    call = nn.Module.__call__

    def work(trace, started, ending):
        with trace as seen:
            started.set()
            ending.wait()
            model(x)
        traces.append(seen)

    traces, threads, endings = [], [], []
    for trace in (first, second):
        started, ending = threading.Event(), threading.Event()
        threads.append(threading.Thread(target=work, args=(trace, started, ending)))
        endings.append(ending)
        threads[-1].start()
        started.wait()
    for thread, ending in zip(threads, endings):  # the first ends first
        ending.set()
        thread.join()
    assert [[loss.path for loss in trace.losses] for trace in traces] == [["4"], ["4"]]
    assert nn.Module.__call__ is call


def test_a_trace_is_final_after_its_block_and_does_not_hold_the_model(model, x):
    with nhwc.trace(model) as trace:
        model(x)
    operators = trace.operators
    model(x)
    assert trace.operators == operators
    assert not [each for each in gc.get_referrers(model) if each is trace]


def test_rows_do_not_grow_with_shapes_nor_counters_with_threads(model):
    with nhwc.trace(model) as trace, torch.no_grad():
        for size in range(8, 28):
            thread = threading.Thread(target=model, args=(channels_last(torch.randn(2, 3, size, 8)),))
            thread.start()
            thread.join()
    assert [(row.count, row.inputs[0].shape) for row in trace.losses] == [(20, (2, 8, 6, 6))]
    assert len(trace._tallies._operators) <= 3


@pytest.mark.exhaustive
def test_memory_does_not_grow_with_steps(model, x):
    def run(steps):
        for _ in range(steps):
            model(x).sum().backward()
            torch.log_softmax(x, 1).sum()
            with torch.inference_mode():
                model(x)

    def size():
        gc.collect()
        # PyTorch itself takes some, under any mode.
        ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/torch_nhwc/*")])
        return sum(each.size for each in ours.statistics("filename"))

    tracemalloc.start()
    try:
        with nhwc.trace(model):
            run(50)  # by then the tables of what is alive have their size
            first = size()
            run(50)
            assert size() < first + 8_000  # a reference for each operator would be five times that
    finally:
        tracemalloc.stop()


def test_an_optimizer_loses_nothing(model, x):
    optimizer = torch.optim.Adam(model.parameters())
    with nhwc.trace(model) as trace:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    assert {loss.path for loss in trace.losses} == {"4"}


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_what_cannot_be_seen_is_told():
    scripted = torch.jit.script(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Softmax2d()))
    model = nn.Sequential(scripted.to(memory_format=torch.channels_last), nn.Sequential(nn.ReLU()))
    model[1].compile(backend="eager")
    x = channels_last(torch.randn(2, 3, 8, 8))
    with nhwc.trace(model) as trace:
        model(x)
        torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))
    assert [(row.path, row.why[:14]) for row in trace.unseen] == [
        ("0", "a TorchScript "),
        ("1", "it is compiled"),
        ("", "what cond runs"),
    ]
    assert [(loss.path, loss.operator) for loss in trace.losses] == [("0", "aten::_softmax")]
    assert "not seen: 0: a TorchScript module" in str(trace)


@pytest.mark.parametrize("compiled", ["outside", "a function inside"])
def test_what_is_compiled_elsewhere_is_told(model, x, compiled):
    def run(x):
        return torch.compile(lambda x: x.contiguous() * 2, backend="eager")(x) if compiled != "outside" else x

    network = nn.Sequential(model, Function(run))
    call = torch.compile(network, backend="eager") if compiled == "outside" else network
    with nhwc.trace(network) as trace:
        call(x)
    path = "" if compiled == "outside" else "1"
    assert [(row.path, row.why[:14]) for row in trace.unseen] == [(path, "it is compiled")]
    assert {"0.4": True, "1": compiled != "outside"}.items() >= {loss.path: True for loss in trace.losses}.items()
