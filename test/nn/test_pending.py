"""Results of norms that wait for the activation after them: what reads them, and how, changes no number."""

import copy
import gc
import io
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from user_code import Doubled

import torch_nhwc as nhwc
from torch_nhwc.nn import pending
from torch_nhwc.nn.pending import Pending


@pytest.fixture(autouse=True)
def smaller_norms_wait(monkeypatch):
    for name in ("_FEWEST_IN_GROUPS", "_FEWEST_IN_A_CALL"):
        monkeypatch.setattr(pending, name, pending._FEWEST)
    monkeypatch.setattr(pending._local, "is_padding_apart", False)  # otherwise results of activations wait for zeros


NORMS = {
    "batch": lambda: nn.BatchNorm2d(16),
    "group": lambda: nn.GroupNorm(4, 16),
    "instance": lambda: nn.InstanceNorm2d(16, affine=True),
}
ACTIVATIONS = {
    "relu": nn.ReLU(),
    "relu in place": nn.ReLU(inplace=True),
    "relu6": nn.ReLU6(),
    "leaky_relu": nn.LeakyReLU(0.1, inplace=True),
    "silu": nn.SiLU(inplace=True),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "prelu": nn.PReLU(),
}
every_norm = pytest.mark.parametrize("kind", NORMS)


def changed(values, by):
    values += by
    return values


# What a model may do with the result of the norm, `y`, where `c` is what was normalised.
READERS = {
    "activation": lambda net, y, c: net.a(y),
    "twice": lambda net, y, c: net.a(y) + y.mean(),
    "two activations": lambda net, y, c: F.relu(y) + F.silu(y),
    "dropout of nothing": lambda net, y, c: net.a(F.dropout(y, 0.0)),
    "slice": lambda net, y, c: net.a(y[:, :, 1:]),
    "other function": lambda net, y, c: torch.tanh(y),
    "itself": lambda net, y, c: y,
    "list": lambda net, y, c: torch.cat([y, net.a(y)], 1),
    "shape": lambda net, y, c: net.a(y).reshape(y.shape[0], y.size(1), -1),
    "changed in place": lambda net, y, c: net.a(changed(y, 1)),
    "statement in place": lambda net, y, c: (F.relu(y, inplace=True), y)[1] * 3,
    "residual": lambda net, y, c: F.relu(y + c),
    "residual first": lambda net, y, c: F.relu(c + y),
    "residual in place": lambda net, y, c: F.relu(changed(y, c)),
    "residual, read twice": lambda net, y, c: F.relu(changed(y, c)) * y,
    "sum alone": lambda net, y, c: y + c,
    "two that wait": lambda net, y, c: F.relu(y + net.n(c * 2)),
    "two residuals": lambda net, y, c: F.relu(y + c + c),
    "scaled residual": lambda net, y, c: F.relu(torch.add(y, c, alpha=2)),
    "number": lambda net, y, c: F.relu(y + 1),
    "broadcast": lambda net, y, c: F.relu(y + c.mean((2, 3), keepdim=True)),
    "autograd function": lambda net, y, c: Doubled.apply(y),
    "detached": lambda net, y, c: F.relu(y.detach()) + net.a(c),
    "without a gradient": lambda net, y, c: net.a(c) + torch.no_grad()(F.relu)(y),
    "data": lambda net, y, c: net.a(c) * y.data,
    "clone": lambda net, y, c: net.a(y.clone()),
    "unpacked": lambda net, y, c: torch.stack([*y]),
    "condition": lambda net, y, c: net.a(y) if y.sum() > -1e9 else c,
    "dtype": lambda net, y, c: net.a(y.double()).to(y.dtype),
    "checkpoint": lambda net, y, c: checkpoint(net.a, y, use_reentrant=True),
}


class Net(nn.Module):
    def __init__(self, norm, activation, reader):
        super().__init__()
        self.c, self.n, self.a = nn.Conv2d(3, 16, 3, padding=1), norm, activation
        self.reader = reader

    def forward(self, x):
        c = self.c(x)
        return READERS[self.reader](self, self.n(c), c)


def pair(kind="batch", activation="relu", reader="activation", train=True):
    """Return a model, and a converted copy."""
    plain = Net(NORMS[kind](), copy.deepcopy(ACTIVATIONS[activation]), reader).train(train)
    with torch.no_grad():
        plain.n.weight.normal_()
        plain.n.bias.normal_()
    ours = copy.deepcopy(plain)
    nhwc.convert_(ours, input_format="channels_last", optimizer=())
    return plain, ours


def results(net, x, grad=True):
    """Return the output, the gradients and the buffers after a step."""
    x = x.to(net.c.weight.dtype)
    with torch.set_grad_enabled(grad):
        out = net(x)
        if grad and out.requires_grad:
            out.square().sum().backward()
    return [out.detach(), *(each.grad for each in net.parameters()), *(each.double() for each in net.buffers())]


def assert_alike(plain, ours, x, grad=True):
    """Compare with float64: as accurate as PyTorch, for a sum of squares in which some gradients cancel."""
    exact = copy.deepcopy(plain).double()
    for right, stock, own in zip(*(results(each, x, grad) for each in (exact, plain, ours))):
        assert (right is None) == (own is None)
        if right is not None:
            error, limit = (own.double() - right).norm(), 4 * (stock.double() - right).norm()
            assert error <= limit + 2e-6 * right.norm() + 0.1 * (right.norm() < 1e-6)


def waits(net, x):
    return type(net.n(net.c(x.contiguous(memory_format=torch.channels_last)))) is Pending


X = torch.randn(4, 3, 40, 40, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("reader", READERS)
@every_norm
def test_any_reader_gets_the_same_numbers(kind, reader, grad):
    for train in (True, False):
        plain, ours = pair(kind, reader=reader, train=train)
        assert waits(copy.deepcopy(ours), X)
        for _ in range(3):  # the first two results are read early, perhaps
            assert_alike(copy.deepcopy(plain), copy.deepcopy(ours), X, grad)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@every_norm
def test_every_activation(kind, activation):
    for train, grad in ((True, True), (False, True), (False, False)):
        plain, ours = pair(kind, activation, train=train)
        assert_alike(plain, ours, X, grad)


@pytest.mark.parametrize("slope", [0.25, 0.0, -0.5])
@every_norm
def test_a_slope_is_trained(kind, slope):
    """Alone as well, and twice; a slope that was changed before the backward is PyTorch's error."""
    plain, ours = pair(kind, "prelu")
    for net in (plain, ours):
        nn.init.constant_(net.a.weight, slope)
    assert_alike(copy.deepcopy(plain), copy.deepcopy(ours), X)
    for net in (plain, ours):
        net.requires_grad_(False)
        net.a.requires_grad_()
    assert_alike(copy.deepcopy(plain), copy.deepcopy(ours), X)

    def twice(net):
        net.c.requires_grad_()
        (first,) = torch.autograd.grad(net(X).square().mean(), net.a.weight, create_graph=True)
        return torch.autograd.grad(first.square(), [net.a.weight, net.c.weight])

    torch.testing.assert_close(twice(ours), twice(plain), rtol=1e-3, atol=1e-5)
    out = ours(X)
    with torch.no_grad():
        ours.a.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@every_norm
def test_a_slope_for_each_channel(kind, monkeypatch):
    """With a residual in inference, and where only slopes are trained."""
    monkeypatch.setitem(READERS, "activation of a sum", lambda net, y, c: net.a(y + c))
    for reader in ("activation", "activation of a sum"):
        plain, ours = pair(kind, "prelu", reader)
        for net in (plain, ours):
            net.a = nn.PReLU(16)
            nn.init.uniform_(net.a.weight, -0.5, 1.5, torch.Generator().manual_seed(0))
        for train, grad in ((True, True), (False, True), (False, False)):
            assert_alike(copy.deepcopy(plain.train(train)), copy.deepcopy(ours.train(train)), X, grad)
        for net in (plain, ours):
            net.requires_grad_(False)
            net.a.requires_grad_()
        assert_alike(copy.deepcopy(plain), copy.deepcopy(ours), X)
        assert waits(ours, X)

    def twice(net):
        net.c.requires_grad_()
        (first,) = torch.autograd.grad(net(X).square().mean(), net.a.weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), [net.a.weight, net.c.weight])

    torch.testing.assert_close(twice(ours), twice(plain), rtol=1e-3, atol=1e-5)


def test_a_slope_after_a_residual_is_pytorch_s_where_a_gradient_is_needed(monkeypatch):
    monkeypatch.setitem(READERS, "activation of a sum", lambda net, y, c: net.a(y + c))
    assert_alike(*pair("instance", "prelu", "activation of a sum"), X)


def test_slopes_under_autocast_and_wrong_ones():
    plain, ours = pair("instance", "prelu")
    for net in (plain, ours):
        net.a = nn.PReLU(16)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ours(X), plain(X), rtol=0.02, atol=0.02)
    ours.a = nn.PReLU(3)
    with pytest.raises(RuntimeError, match="Mismatch of parameter numbers"):
        ours(X)


def test_an_activation_takes_the_result_and_anything_else_makes_it_a_tensor():
    _, ours = pair()
    y = ours.n(ours.c(X.contiguous(memory_format=torch.channels_last)))
    assert type(y) is Pending
    assert y.shape == (4, 16, 40, 40)
    assert y.dtype == torch.float32
    assert y.device.type == "cpu"
    assert type(F.relu(y)) is torch.Tensor
    assert nn.Dropout(0.0)(y) is nn.Dropout(0.5).eval()(y) is y
    assert type(y) is Pending, "sizes, an activation and a dropout of nothing leave it as it is"
    with pytest.raises(ValueError, match="has to be between 0 and 1"):
        F.dropout(y, -1, training=False)
    assert y.requires_grad
    assert type(y) is torch.Tensor
    assert y.grad_fn is not None
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_code_in_c_that_does_not_ask_gets_an_error_and_the_layer_waits_no_more(mode):
    _, ours = pair()
    x = ours.c(X.contiguous(memory_format=torch.channels_last)).detach()
    with mode():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="it has no memory yet"):
                torch._C._to_dlpack(ours.n(x))
        assert type(ours.n(x)) is torch.Tensor


def test_a_layer_whose_results_are_taken_goes_on_to_wait():
    """By an activation, a sum, or a batch norm."""
    _, ours = pair("batch", train=False)
    other = torch.ones(4, 16, 40, 40).contiguous(memory_format=torch.channels_last)
    for train in (True, False):
        ours.train(train)
        for _ in range(4):
            with torch.set_grad_enabled(train):
                y = ours.n(ours.c(X.contiguous(memory_format=torch.channels_last)))
                assert type(y) is Pending
                F.relu(y + other if train else y)
                del y


@pytest.mark.parametrize(
    "read",
    [repr, copy.copy, lambda y: y.detach().numpy(), lambda y: y.tolist(), bool],
    ids=["repr", "copy", "numpy", "tolist", "bool"],
)
def test_what_shows_or_copies_a_result_reads_it(read):
    _, ours = pair()
    with torch.no_grad():
        c = ours.c(X.contiguous(memory_format=torch.channels_last))
        y, expected = ours.n(c), ours.n(c).clone()
    if read is bool:
        with pytest.raises(RuntimeError, match="more than one value"):
            bool(y)
    else:
        read(y)
    assert torch.equal(y, expected)
    assert torch.equal(pickle.loads(pickle.dumps(ours.n(c).detach())), ours.n(c).detach())
    assert torch.equal(copy.deepcopy(ours.n(c).detach()), ours.n(c).detach())
    buffer = io.BytesIO()
    torch.save(ours.n(c).detach(), buffer)
    buffer.seek(0)
    assert torch.load(buffer).shape == c.shape


def test_running_statistics_are_updated_at_the_norms_call():
    plain, ours = pair()
    c = plain.c(X)
    plain.n(c)
    ours.n(ours.c(X.contiguous(memory_format=torch.channels_last)))  # dropped
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(ours.n, name), getattr(plain.n, name))


def test_what_pytorch_refuses_is_refused_by_the_norms_own_call():
    _, ours = pair()
    with pytest.raises(RuntimeError, match="running_mean should contain 40 elements not 16"):
        ours.n.eval()(torch.zeros(4, 40, 20, 20).contiguous(memory_format=torch.channels_last))
    with pytest.raises(ValueError, match="expected 4D input"):
        ours.n(torch.zeros(40000, 16))
    ours.n.train()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        ours.n(torch.zeros(1, 16, 1, 1))


def test_an_input_that_changes_before_the_result_is_read_is_an_error():
    for change in ("input", "weight", "residual"):
        _, ours = pair("group")
        with torch.no_grad():
            c = ours.c(X.contiguous(memory_format=torch.channels_last))
            residual = c.clone()
            y = ours.n(c)
            y = y + residual if change == "residual" else y
            {"input": c, "weight": ours.n.weight, "residual": residual}[change].mul_(2)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="was changed in place before its result was read"):
                    F.relu(y)


def test_code_that_reads_without_asking_gets_an_error():
    _, ours = pair()
    y = ours.n(ours.c(X.contiguous(memory_format=torch.channels_last)))
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="TORCH_NHWC_PENDING=0"):
        y.sum()
    assert torch.isfinite(y.sum())


def test_a_norm_whose_results_are_read_by_something_else_waits_no_more():
    _, ours = pair(reader="itself")
    for expected in (True, True, False, False):
        assert waits(copy.deepcopy(ours), X), "a copy has not been read"
        c = ours.c(X.contiguous(memory_format=torch.channels_last))
        y = ours.n(c)
        assert (type(y) is Pending) == expected
        y.sum()


def test_small_activations_do_not_wait():
    _, ours = pair()
    assert not waits(ours, X[:1, :, :20, :20])


def test_hooks_see_results():
    for register in ("register_forward_hook", "register_full_backward_hook", "register_full_backward_pre_hook"):
        for layer in ("n", "a"):
            plain, ours = pair()
            seen = []
            for net in (plain, ours):
                getattr(getattr(net, layer), register)(lambda module, *given: seen.append(given[-1]))
            assert_alike(plain, ours, X)
            assert len(seen) == 3  # the exact copy has one, too
            values = [each[0] if isinstance(each, tuple) else each for each in seen]
            torch.testing.assert_close(values[2] * 1, values[1] * 1, rtol=1e-3, atol=1e-4)
    plain, ours = pair()
    ours.a.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    plain.a.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
    assert_alike(plain, ours, X)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(use_reentrant):
    for reader in ("activation", "itself", "residual"):
        plain, ours = pair("group", reader=reader)

        class Recomputing(nn.Module):
            def __init__(self, net):
                super().__init__()
                self.net, self.c = net, net.c

            def forward(self, x):
                return checkpoint(self.net, x.requires_grad_(), use_reentrant=use_reentrant)

        assert_alike(Recomputing(plain), Recomputing(ours), X.clone())


def test_threads_may_read_one_result():
    _, ours = pair()
    c = ours.c(X.contiguous(memory_format=torch.channels_last)).detach()
    with torch.no_grad():
        y, expected = ours.n(c), ours.n(c).clone()
    found = []
    threads = [threading.Thread(target=lambda: found.append(y.clone())) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert all(torch.equal(each, expected) for each in found)
    assert len(found) == 8


def test_an_exception_in_between_leaves_everything_usable():
    plain, ours = pair()
    hook = ours.a.register_forward_pre_hook(lambda module, given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ours(X)
    hook.remove()
    plain(X)  # the running statistics of the attempt
    assert_alike(plain, ours, X)


def test_one_activation_after_ten_norms_and_indexed_sequentials():
    activation = nn.ReLU(inplace=True)
    layers = [each for _ in range(10) for each in (nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), activation)]
    plain = nn.Sequential(nn.Sequential(*layers[:15]), nn.Sequential(*layers[15:]))
    ours = copy.deepcopy(plain)
    nhwc.convert_(ours, input_format="channels_last", optimizer=())
    x = torch.randn(4, 3, 64, 64)
    for part in (slice(None), slice(0, 1)):
        torch.testing.assert_close(ours[part](x), plain[part](x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours[0][0:2](x), plain[0][0:2](x), rtol=1e-4, atol=1e-4)


def test_what_observes_operators_sees_pytorchs_way():
    plain, ours = pair(train=False)
    x = X.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = plain(X)
        with FlopCounterMode(display=False):
            assert type(ours.n(ours.c(x))) is torch.Tensor
        for other in (
            torch.jit.trace(ours, X, check_trace=False),
            torch.jit.script(nn.Sequential(ours.c, ours.n, ours.a)),
            torch.compile(ours, backend="eager"),
            torch.export.export(ours, (X,)).module(),
        ):
            out = other(X)
            assert type(out) is torch.Tensor
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    parameters = dict(ours.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(ours, parameters, (x,)).square().sum()

    gradient = torch.func.grad(loss)(parameters, X)
    plain(X).square().sum().backward()
    torch.testing.assert_close(gradient["c.weight"], plain.c.weight.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("records_inputs", [False, True])
def test_a_profiler_sees_what_runs_unless_it_looks_at_the_memory_of_inputs(records_inputs, capfd, tmp_path):
    _, ours = pair(train=False)
    with torch.no_grad(), torch.profiler.profile(record_shapes=records_inputs) as profile:
        ours(X)
    names = {event.key for event in profile.key_averages()}
    assert ("nhwc::norm_activation" in names) is not records_inputs
    observer = torch.profiler.ExecutionTraceObserver().register_callback(str(tmp_path / "trace.json"))
    with torch.no_grad(), torch.profiler.profile(execution_trace_observer=observer):
        ours(X)
    assert "Exception" not in capfd.readouterr().err
    assert type(ours.n(ours.c(X))) is not torch.Tensor  # the layer waits again


def test_inference_mode_and_subclasses():
    class Image(torch.Tensor):
        pass

    plain, ours = pair(train=False)
    with torch.inference_mode():
        torch.testing.assert_close(ours(X), plain(X), rtol=1e-4, atol=1e-5)
    out = ours(X.as_subclass(Image))
    assert type(out) is Image
    torch.testing.assert_close(out.as_subclass(torch.Tensor), plain(X), rtol=1e-4, atol=1e-5)


def test_autocast_has_the_same_dtypes():
    plain, ours = pair(train=False)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        out, expected = ours(X), plain(X)
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=0.05, atol=0.05)


def test_nothing_of_a_result_outlives_it():
    _, ours = pair()
    c = ours.c(X.contiguous(memory_format=torch.channels_last))
    y = ours.n(c)
    out = F.relu(y)
    del y, out, ours
    gc.collect()
    assert not any(type(each) is Pending for each in gc.get_objects())


def test_a_variable_switches_it_off():
    said = []
    script = (
        "import torch, torch_nhwc; from torch import nn; "
        "net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)); torch_nhwc.convert_(net); "
        "print(type(net[1](torch.randn(4, 16, 64, 64).to(memory_format=torch.channels_last))).__name__)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "TORCH_NHWC_PENDING": "0"}, capture_output=True, text=True
    )
    assert run.stdout == "Tensor\n", run.stderr
    exec(script, {"print": said.append})
    assert said == ["Pending"]
