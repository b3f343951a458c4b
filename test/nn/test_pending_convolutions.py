"""Convolutions that wait for the batch norm and the activation after them, where nothing is derived."""

import copy
import gc
import math
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import torch_nhwc as nhwc
from torch_nhwc.nn import pending
from torch_nhwc.nn.pending import Pending

CONVOLUTIONS = {
    "one tap": (lambda: nn.Conv2d(24, 64, 1, bias=False), (2, 24, 56, 56)),
    "few pixels of PyTorch's own": (lambda: nn.Conv2d(16, 96, 1, bias=False), (1, 16, 64, 64)),
    "strided": (lambda: nn.Conv2d(8, 32, 3, stride=2, padding=1), (2, 8, 130, 130)),
    "groups": (lambda: nn.Conv2d(64, 64, 3, 2, 1, groups=4, bias=False), (2, 64, 96, 96)),
    "depthwise": (lambda: nn.Conv2d(96, 96, 3, padding=1, groups=96, bias=False), (2, 96, 56, 56)),
    "same": (lambda: nn.Conv2d(12, 24, 5, padding="same"), (4, 12, 64, 64)),
    "valid": (lambda: nn.Conv2d(12, 24, 5, padding="valid", dilation=2), (4, 12, 72, 72)),
    "fewer multiplications": (lambda: nn.Conv2d(64, 72, 3, padding=1), (2, 64, 57, 55)),
    "fewer multiplications, groups": (lambda: nn.Conv2d(128, 128, 3, padding=1, groups=2), (1, 128, 60, 60)),
    "fewer multiplications, volume": (lambda: nn.Conv3d(16, 20, 3, padding=1, bias=False), (1, 16, 25, 24, 23)),
    "few inputs": (lambda: nn.Conv2d(3, 32, 1), (2, 3, 80, 80)),
    "volume": (lambda: nn.Conv3d(8, 12, 3, stride=2, padding=1), (2, 8, 48, 48, 48)),
    "depthwise volume": (lambda: nn.Conv3d(40, 80, 3, 1, 1, groups=40, bias=False), (1, 40, 21, 22, 23)),
    "one tap of a volume": (lambda: nn.Conv3d(24, 64, 1), (2, 24, 10, 28, 29)),
}
OUR_OWN = ["few inputs", "depthwise volume", "one tap of a volume"]
ACTIVATIONS = {
    "none": nn.Identity(),
    "relu": nn.ReLU(),
    "relu in place": nn.ReLU(inplace=True),
    "relu6": nn.ReLU6(inplace=True),
    "leaky_relu": nn.LeakyReLU(0.2),
    "prelu": nn.PReLU(),
    "slopes": nn.PReLU(),
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "hardswish": nn.Hardswish(),
}


def residual_of(y):
    """Return other numbers for each channel and pixel, in channels-last."""
    values = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return values.contiguous(memory_format=FORMATS[y.dim()])


class Net(nn.Module):
    def __init__(self, make, activation="relu", residual="no", affine=True):
        super().__init__()
        self.c = make()
        norm = nn.BatchNorm3d if isinstance(self.c, nn.Conv3d) else nn.BatchNorm2d
        self.n = norm(self.c.out_channels, affine=affine)
        self.a, self.residual = copy.deepcopy(ACTIVATIONS[activation]), residual
        if activation == "slopes":
            self.a.weight = nn.Parameter(torch.linspace(-0.5, 1.5, self.c.out_channels))

    def forward(self, x):
        y = self.n(self.c(x))
        if self.residual == "sum":
            y = y + residual_of(y)
        elif self.residual == "in place":
            y += residual_of(y)
        return self.a(y)


def pair(kind="one tap", **options):
    """Return a model in evaluation mode, a converted copy, and an input."""
    make, shape = CONVOLUTIONS[kind]
    plain = Net(make, **options).eval()
    with torch.no_grad():
        plain.n.running_mean.normal_()
        plain.n.running_var.uniform_(0.5, 2)
        for each in plain.n.parameters():
            each.normal_()
    ours = copy.deepcopy(plain)
    nhwc.convert_(ours, optimizer=())
    x = torch.randn(shape)
    return plain, ours, x, x.contiguous(memory_format=FORMATS[x.dim()])


FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@pytest.fixture(autouse=True)
def without_gradients(monkeypatch):
    monkeypatch.setattr(pending._local, "is_padding_apart", False)  # otherwise results of activations wait for zeros
    with torch.no_grad():
        yield


def assert_as_accurate(out, stock, exact):
    """Compare with float64: at most twice the error of contiguous PyTorch's."""
    assert type(out) is torch.Tensor
    assert out.stride() == stock.contiguous(memory_format=FORMATS[out.dim()]).stride()
    error = (out.double() - exact).norm()
    assert error <= 2 * (stock.double() - exact).norm() + 1e-7 * exact.norm()


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_a_convolution_waits_and_is_as_accurate(kind, activation):
    plain, ours, x, channels_last = pair(kind, activation=activation)
    way = torch.ops.nhwc.convolution_way(
        *(channels_last, ours.c.weight, ours.c.bias, ours.c.stride, ours.c.padding, ours.c.dilation, ours.c.groups)
    )[0]
    waits = way in ("pytorch", "winograd", "kernels", "kernels_in_part", "linear")  # not on every CPU
    assert (type(ours.c(channels_last)) is Pending) == waits
    assert type(ours.n(ours.c(channels_last))) is Pending
    out = ours(channels_last)
    assert_as_accurate(out * 1, plain(x), copy.deepcopy(plain).double()(x.double()))
    for each, other in zip(ours.parameters(), plain.parameters()):
        assert torch.equal(each, other)


@pytest.mark.parametrize("residual", ["sum", "in place"])
@pytest.mark.parametrize("kind", ["strided", "fewer multiplications", "fewer multiplications, groups", *OUR_OWN])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_residual_is_added_in_the_same_pass(activation, kind, residual):
    plain, ours, x, channels_last = pair(kind, activation=activation, residual=residual, affine=False)
    out = ours(channels_last)
    assert_as_accurate(out * 1, plain(x), copy.deepcopy(plain).double()(x.double()))


@pytest.mark.parametrize("kind", OUR_OWN)
def test_each_number_of_threads_finishes_all_results(kind):
    """A sample is some blocks for each thread, whose results get what follows while they are in a cache."""
    plain, ours, x, channels_last = pair(kind, residual="sum")
    exact, before = copy.deepcopy(plain).double()(x.double()), torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert_as_accurate(ours(channels_last) * 1, plain(x), exact)
    finally:
        torch.set_num_threads(before)


def test_an_activation_without_a_norm():
    plain, ours, x, channels_last = pair("strided")
    out, stock = F.relu(ours.c(channels_last)), F.relu(plain.c(x))
    assert_as_accurate(out, stock, F.relu(copy.deepcopy(plain.c).double()(x.double())))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["input", "weight", "bias", "running_mean", "shift", "residual"])
@pytest.mark.parametrize("activation", ["relu", "relu6", "leaky_relu", "silu"])
def test_what_is_not_a_number_stays_so(activation, place, number):
    plain, ours, x, channels_last = pair("strided", activation=activation)
    residual = torch.randn(plain.c(x).shape)
    others = {"residual": residual, "input": x}
    for model in (plain, ours):
        own = {"weight": model.c.weight, "bias": model.c.bias, "running_mean": model.n.running_mean}
        others |= own | {"shift": model.n.bias}
        others[place][(0,) * others[place].dim()] = number
    channels_last.copy_(x)
    for _ in range(3):  # the outputs of earlier calls are known to be finite, perhaps
        stock = plain.a(plain.n(plain.c(x)) + residual)
        out = ours.a(ours.n(ours.c(channels_last)) + residual.contiguous(memory_format=torch.channels_last))
        assert torch.equal(out.isnan(), stock.isnan())
        torch.testing.assert_close(out, stock, equal_nan=True, rtol=1e-4, atol=1e-4)


def test_numbers_that_are_changed_later_are_looked_at_again():
    plain, ours, x, channels_last = pair("strided")
    head = nn.Sequential(nn.Conv2d(32, 32, 1), nn.ReLU())
    ours_head = copy.deepcopy(head)
    nhwc.convert_(ours_head)
    y, stock = ours(channels_last), plain(x)
    assert id(y) in pending._finite
    for each in (y, stock):
        each[0, 3, 5, 5] = math.nan
    torch.testing.assert_close(ours_head(y), head(stock), equal_nan=True, rtol=1e-4, atol=1e-4)
    del y
    gc.collect()
    assert not pending._finite


def test_results_of_finite_numbers_are_finite_by_our_kernels_too():
    layers = [nn.Conv2d(8, 64, 1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 72, 3, padding=1), nn.BatchNorm2d(72)]
    plain = nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(72, 48, 1), nn.BatchNorm2d(48), nn.ReLU()).eval()
    ours = copy.deepcopy(plain)
    nhwc.convert_(ours)
    x = torch.randn(2, 8, 57, 55)
    y = ours[:6](x.contiguous(memory_format=torch.channels_last))
    assert id(y) in pending._finite
    for model in (plain, ours):
        model[3].weight[5] = math.nan
    y = ours[:6](x.contiguous(memory_format=torch.channels_last))
    assert id(y) not in pending._finite
    out = ours(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(out * 1, plain(x), equal_nan=True, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("change", ["input", "weight", "norm", "running_var", "residual"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_changes_before_the_result_is_read_is_an_error(mode, change):
    _, ours, _, x = pair("strided")
    with mode():
        residual = ours(x)
        y = ours.n(ours.c(x))
        y = y + residual if change == "residual" else y
        changed = {"input": x, "weight": ours.c.weight, "norm": ours.n.bias, "running_var": ours.n.running_var}
        ({"residual": residual} | changed)[change].mul_(2)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="what a PreservingConv2d reads was changed in place"):
                F.relu(y)


def test_the_inference_mode_has_the_same_numbers_and_versions():
    make, shape = CONVOLUTIONS["one tap"]
    plain = nn.Sequential(make(), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(1), nn.Conv2d(64, 64, 1), nn.ReLU())
    plain.eval()
    ours = copy.deepcopy(plain)
    nhwc.convert_(ours)
    x = torch.randn(shape)
    expected = plain(x)
    with torch.inference_mode():
        for given in (x, x.clone(), x.clone(memory_format=torch.channels_last)):
            for _ in range(2):
                torch.testing.assert_close(ours(given), expected, rtol=1e-4, atol=1e-4)
        y = ours[1](ours[0](x.clone(memory_format=torch.channels_last)))  # an inference tensor has no version
        assert type(y) is Pending
        c = ours[0](x.clone(memory_format=torch.channels_last))
        assert not c.is_inference()


def test_a_norm_of_an_inference_tensor_does_not_wait():
    norm = nn.Sequential(nn.BatchNorm2d(64)).eval()
    nhwc.convert_(norm)
    with torch.inference_mode():
        x = torch.randn(2, 64, 32, 32).contiguous(memory_format=torch.channels_last)
        y = norm[0](x)
        expected = y.clone()
        x.mul_(2)
        assert torch.equal(F.relu(y), F.relu(expected))


def test_both_may_be_read():
    plain, ours, x, channels_last = pair("strided")
    for _ in range(4):
        c, stock = ours.c(channels_last), plain.c(x)
        y = ours.n(c)
        found = [F.relu(y), c * 2, y + 1]
        expected = [F.relu(plain.n(stock)), stock * 2, plain.n(stock) + 1]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert type(ours.c(channels_last)) is torch.Tensor, "read by something else twice, it waits no more"


def test_a_convolution_with_a_norm_always_waits():
    _, ours, _, x = pair("strided", activation="none")
    for _ in range(5):
        y = ours.n(ours.c(x))
        assert type(y) is Pending
        y.sum()


@pytest.mark.parametrize("norm", [nn.GroupNorm(4, 32), nn.BatchNorm2d(32), nn.InstanceNorm2d(32)])
def test_other_norms_read_the_convolution(norm):
    plain = nn.Sequential(CONVOLUTIONS["strided"][0](), norm.train(), nn.ReLU())
    ours = copy.deepcopy(plain)
    nhwc.convert_(ours)
    x = torch.randn(CONVOLUTIONS["strided"][1])
    for _ in range(3):
        torch.testing.assert_close(ours(x), plain(x), rtol=1e-3, atol=1e-3)
    for each, other in zip(ours.buffers(), plain.buffers()):
        torch.testing.assert_close(each, other)


def test_what_pytorch_refuses_is_refused_by_the_layers_own_call():
    _, ours, _, x = pair("strided")
    with pytest.raises(RuntimeError, match=r"expected input.* to have 8 channels, but got 9 channels"):
        ours.c(torch.zeros(2, 9, 130, 130).contiguous(memory_format=torch.channels_last))
    wrong = nn.Sequential(nn.BatchNorm2d(31)).eval()
    nhwc.convert_(wrong)
    with pytest.raises(RuntimeError, match="running_mean should contain 32 elements not 31"):
        wrong[0](ours.c(x))
    with pytest.raises(ValueError, match="nhwc::convolution_activation: expected none, relu, leaky_relu"):
        torch.ops.nhwc.convolution_activation(
            x, ours.c.weight, None, *[None] * 5, [2, 2], [1, 1], [1, 1], 1, 0.0, False, "tanh", 0.0
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [("padding", (3, 3)), ("padding", 2), ("stride", (1, 2)), ("dilation", 2), ("padding", "valid"), ("groups", 1)],
)
def test_options_that_are_changed_later_hold(name, value):
    plain, ours, x, channels_last = pair("strided")
    for net in (plain, ours):
        setattr(net.c, name, value)
    torch.testing.assert_close(ours(channels_last), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        lambda net, x: x[:1, :, :32, :32],
        lambda net, x: x.double() if net.double() else x,
        lambda net, x: x.bfloat16() if net.bfloat16() else x,
        lambda net, x: x[0],
    ],
    ids=["small", "double", "bfloat16", "one sample"],
)
def test_others_do_not_wait(change):
    _, ours, _, x = pair("strided")
    assert type(ours.c(change(ours, x))) is torch.Tensor


def test_gradients_and_observers_keep_it_from_waiting():
    plain, ours, x, channels_last = pair("strided")
    with torch.enable_grad():
        assert type(ours.c(channels_last)) is torch.Tensor
        assert ours(channels_last).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert ours.c(channels_last).dtype == torch.bfloat16
    with FlopCounterMode(display=False) as counter:
        ours(channels_last)
    assert counter.get_total_flops() == 2 * plain.c(x).numel() * 8 * 9
    with torch.profiler.profile(record_shapes=True):
        assert type(ours.c(channels_last)) is torch.Tensor
    assert type(ours.c(channels_last)) is not torch.Tensor
    with torch.backends.mkldnn.flags(enabled=False, deterministic=False, fp32_precision="none"):
        torch.testing.assert_close(ours(channels_last), plain(x), rtol=1e-4, atol=1e-4)
    for other in (torch.compile(ours, backend="eager"), torch.jit.trace(ours, channels_last)):
        torch.testing.assert_close(other(channels_last), plain(x), rtol=1e-4, atol=1e-4)


def test_autocast_begins_between_the_layers():
    plain, ours, x, channels_last = pair("strided")
    y = ours.n(ours.c(channels_last))
    with torch.autocast("cpu", torch.bfloat16):
        out = F.relu(y)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, plain(x), rtol=1e-4, atol=1e-4)


def test_threads_and_copies():
    plain, ours, x, channels_last = pair("strided")
    y, expected = ours.n(ours.c(channels_last)), plain.n(plain.c(x))
    found = []
    threads = [threading.Thread(target=lambda: found.append(y + 0)) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for each in (*found, copy.deepcopy(ours.n(ours.c(channels_last)))):
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-4)


def test_hooks_see_results():
    plain, ours, x, channels_last = pair("strided")
    seen = []
    for net in (plain, ours):
        net.c.register_forward_hook(lambda module, args, out: seen.append(out))
    plain(x), ours(channels_last)
    torch.testing.assert_close(seen[1] * 1, seen[0] * 1, rtol=1e-4, atol=1e-4)


def test_an_option_keeps_all_results_from_waiting():
    plain, ours, x, channels_last = pair("strided")
    at_once = copy.deepcopy(plain)
    report = nhwc.convert_(at_once, optimizer=(), preserve="at_once")
    for each in (at_once, copy.deepcopy(at_once), pickle.loads(pickle.dumps(at_once))):
        assert type(each.c(channels_last)) is torch.Tensor
        assert type(each.n(plain.c(channels_last))) is torch.Tensor
        torch.testing.assert_close(each(channels_last), plain(x), rtol=1e-4, atol=1e-4)
    assert type(ours.c(channels_last)) is Pending, "other models are as they were"
    for other in (torch.compile(at_once, backend="eager"), torch.jit.script(nn.Sequential(at_once.c, at_once.n))):
        other(channels_last)
    report.revert()
    assert type(at_once.c) is nn.Conv2d
    nhwc.convert_(at_once, preserve="at_once", optimizer=())
    nhwc.convert_(at_once, torch.contiguous_format, optimizer=())
    assert type(at_once.n) is nn.BatchNorm2d
    made = nhwc.plan(copy.deepcopy(plain), preserve="at_once")
    made = nhwc.Plan.from_json(made.to_json())
    nhwc.convert_(plain, plan=made, optimizer=())
    assert type(plain.c(channels_last)) is torch.Tensor
    with pytest.raises(ValueError, match="expected preserve to be True, False or 'at_once', got 'later'"):
        nhwc.convert_(plain, preserve="later")
