"""Biases of convolutions on a GPU, which PyTorch adds in a pass of their own, wait for what reads the result."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import channels_last
from torch import nn
from torch.utils.checkpoint import checkpoint
from user_code import Doubled

import torch_nhwc as nhwc
from torch_nhwc.nn import pending
from torch_nhwc.nn.pending import Pending, WaitingBias

bias_activation = torch.ops.nhwc.bias_activation


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    """Let biases wait on this machine's CPU, for results of any size."""
    monkeypatch.setattr(pending, "_adds_bias_apart", lambda input: True)
    for name in ("_FEWEST_ON_CUDA", "_FEWEST", "_FEWEST_IN_GROUPS", "_FEWEST_IN_A_CALL"):
        monkeypatch.setattr(pending, name, 1)
    monkeypatch.setattr(pending._local, "is_padding_apart", False)  # otherwise results of activations wait for zeros


NORMS = {
    "batch": lambda: nn.BatchNorm2d(16),
    "batch, untracked": lambda: nn.BatchNorm2d(16, track_running_stats=False),
    "batch, all alike": lambda: nn.BatchNorm2d(16, momentum=None),
    "instance": lambda: nn.InstanceNorm2d(16, affine=True),
    "instance, tracked": lambda: nn.InstanceNorm2d(16, track_running_stats=True),
    "group": lambda: nn.GroupNorm(4, 16),
    "group of one": lambda: nn.GroupNorm(16, 16),
}
X = torch.randn(3, 3, 13, 14, generator=torch.Generator().manual_seed(0))


def network(norm, activation=nn.ReLU):
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), NORMS[norm](), activation())
    with torch.no_grad():
        net[0].bias.normal_(0, 3)
        for each in net[1].parameters():
            each.normal_()
    return net


def converted(net):
    ours = copy.deepcopy(net)
    nhwc.convert_(ours, optimizer=())
    return ours


def step(net, x, grad=True, autocast=False):
    x = channels_last(x.to(net[0].weight.dtype))
    with torch.set_grad_enabled(grad), torch.autocast("cpu", enabled=autocast):
        out = net(x)
        if grad:
            out.square().sum().backward()
    return [out.detach(), *(each.grad for each in net.parameters()), *(each.double() for each in net.buffers())]


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_norms_are_as_accurate_without_the_bias(norm, training, grad):
    plain = network(norm).train(training)
    ours, exact = converted(plain), copy.deepcopy(plain).double()
    for _ in range(3):  # running statistics, and the first two results that are read early
        for right, stock, own in zip(*(step(each, X, grad) for each in (exact, plain, ours)), strict=True):
            if right is not None and right.norm() > 1e-6:
                assert (own.double() - right).norm() <= 2 * (stock.double() - right).norm() + 1e-6 * right.norm()
        for each in (exact, plain, ours):
            each.zero_grad()


@pytest.mark.parametrize("norm", NORMS)
def test_the_derivative_that_a_norm_has_before_it_is_computed(norm):
    """A function in C++ connects to it. A bias that makes no difference has a gradient of zeros, and not none."""
    plain = network(norm)
    ours, exact = converted(plain), copy.deepcopy(plain).double()
    leaves, results = [], []
    for net in (exact, plain, ours):
        x = channels_last(X.to(net[0].weight.dtype)).requires_grad_()
        leaves.append([x, *net.parameters()])
        out = Doubled.apply(net[1](net[0](x)))
        results.append(torch.autograd.grad(out.square().mean(), leaves[-1], create_graph=True))
    for right, stock, own in zip(*results, strict=True):
        room = 1e-5 * right.norm() + 1e-6
        assert (own.double() - right).norm() <= 2 * (stock.double() - right).norm() + room
    if norm not in ("group", "instance, tracked"):
        assert torch.equal(results[2][2], torch.zeros(16))
    for right, stock, own in zip(
        *(torch.autograd.grad(each[0].square().sum(), of, allow_unused=True) for each, of in zip(results, leaves)),
        strict=True,
    ):
        if right is not None:
            room = 1e-4 * right.norm() + 1e-5
            assert (own.double() - right).norm() <= 2 * (stock.double() - right).norm() + room


def test_a_bias_that_changes_before_the_backward_is_no_error():
    net = converted(network("instance"))
    out = net(channels_last(X))
    with torch.no_grad():
        net[0].bias.add_(1)
    out.sum().backward()


@pytest.mark.parametrize("change", ["in place", "by data", "moved", "freed"])
def test_a_bias_that_changes_before_the_result_is_read(change):
    """As sharding, offloading and averages of weights do."""
    net = converted(network("instance"))
    with torch.no_grad():
        expected = net[0](channels_last(X)) * 1
        y = net[0](channels_last(X))
        if change == "in place":
            net[0].bias.add_(1)
        elif change == "by data":
            net[0].bias.data.add_(1)
        elif change == "moved":
            net.to("meta")
        else:
            net[0].bias.untyped_storage().resize_(0)
        assert type(y) is Pending
        assert torch.equal(y * 1, expected)


@pytest.mark.parametrize("grad", [True, False])
def test_autocast_and_half_precision_as_pytorch(grad):
    plain = network("batch")
    ours = converted(plain)
    exact = step(copy.deepcopy(plain).double(), X, grad)
    for right, stock, own in zip(exact, step(plain, X, grad, True), step(ours, X, grad, True), strict=True):
        if right is not None and right.norm() > 1e-6:
            assert own.dtype == stock.dtype
            assert (own.double() - right).norm() <= 2 * (stock.double() - right).norm() + 1e-6 * right.norm()
    with torch.autocast("cpu"), torch.no_grad():
        c = ours[0](channels_last(X))
        assert type(c) is Pending
        assert c.dtype == torch.bfloat16
        assert torch.equal(c * 1, F.conv2d(channels_last(X), ours[0].weight, None, padding=1) + beside(ours[0].bias))


def beside(bias):
    return bias.to(torch.bfloat16).view(-1, 1, 1)


def changed(values, by):
    values += by
    return values


R = torch.randn(3, 16, 13, 14, generator=torch.Generator().manual_seed(1)).contiguous(memory_format=torch.channels_last)
# What a model may do with the result of a convolution.
READERS = {
    "activation": lambda net, c: F.silu(c),
    "itself": lambda net, c: c,
    "other function": lambda net, c: torch.tanh(c),
    "sum": lambda net, c: c + R,
    "sum, second": lambda net, c: R + c,
    "sum in place": lambda net, c: changed(c, R),
    "sum and activation": lambda net, c: F.relu(c + R),
    "sum of two": lambda net, c: F.relu(c + net[0](channels_last(X))),
    "sum, then read": lambda net, c: (c + R) * c,
    "read, then sum": lambda net, c: c * (c + R),
    "sum of sums": lambda net, c: (c + R) + R,
    "slopes": lambda net, c: F.prelu(c, torch.linspace(-0.5, 1, 16)),
    "slope after a sum": lambda net, c: F.prelu(c + R, torch.full((1,), 0.3)),
    "activation, then read": lambda net, c: F.relu(c) + c,
    "activation in place, then read": lambda net, c: (F.relu(c, inplace=True), c)[1] * 2,
    "norm, then read": lambda net, c: net[1](c) * c.mean(),
    "read, then norm": lambda net, c: c.mean() * net[1](c),
    "norm of a sum": lambda net, c: F.relu(net[1](c + R)),
    "norm, then sum": lambda net, c: F.relu(net[1](c) + c),
    "two norms": lambda net, c: net[1](c) + net[1](c),
    "changed, then norm": lambda net, c: net[1](changed(c, 1)),
    "norm, then changed": lambda net, c: F.relu(net[1](c.clone())) + changed(c, 1),
    "autograd function": lambda net, c: Doubled.apply(c),
    "detached": lambda net, c: c.detach() * c,
    "checkpoint": lambda net, c: checkpoint(net[1], c, use_reentrant=True),
    "norm, sum, then activation": lambda net, c: F.silu(net[1](c) + R),
    "norm, then activation in place": lambda net, c: F.relu(net[1](c), inplace=True),
    "norm, then slopes": lambda net, c: F.prelu(net[1](c), torch.linspace(-0.5, 1, 16)),
    "broadcast": lambda net, c: F.relu(c + R[:, :, :1, :1]),
    "without a gradient": lambda net, c: torch.no_grad()(F.relu)(c) + c,
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("reader", READERS)
def test_any_reader_gets_the_same_numbers(reader, grad):
    for norm, training in (("instance", True), ("batch", True), ("batch", False), ("group", True)):
        plain = network(norm).train(training)
        ours = converted(plain)
        results = []
        for net in (plain, ours):
            for _ in range(3):  # the first two are read early, perhaps
                net.zero_grad()
                x = channels_last(X).requires_grad_(grad)
                with torch.set_grad_enabled(grad):
                    out = READERS[reader](net, net[0](x))
                if grad:
                    out.square().mean().backward()
            gradients = [x.grad, *(each.grad for each in net.parameters())]
            results.append([out * 1, *(each for each in gradients if each is not None)])
        for own, stock in zip(*results, strict=True):
            torch.testing.assert_close(own, stock, rtol=1e-3, atol=2e-5)


def test_what_is_fused_is_computed_at_once_and_a_norm_takes_the_result_alone():
    net = converted(network("instance"))
    with torch.no_grad():
        c = net[0](channels_last(X))
        assert type(c) is Pending
        assert type(c.waiting) is WaitingBias
        alone, _ = c.waiting.operands
        y = net[1](c)
        assert y.waiting.operands[0] is alone
        assert type(c) is Pending, "nothing was added to it"
        summed = net[0](channels_last(X)) + R
        assert type(summed) is Pending
        assert type(F.relu(summed)) is torch.Tensor


@torch.no_grad()
def test_a_layer_whose_results_are_read_early_twice_adds_its_bias_at_once():
    net = converted(network("instance"))
    for _ in range(2):
        net[0](channels_last(X)).mean()
    assert type(net[0](channels_last(X))) is torch.Tensor
    for _ in range(3):
        net[1](net.append(converted(network("instance")))[-1][0](channels_last(X)))


@torch.no_grad()
def test_threads_that_read_one_result_add_the_bias_once():
    net = converted(network("instance"))
    expected = net[0](channels_last(X)) * 1
    for _ in range(20):
        pending._early_reads.clear()
        c, found = net[0](channels_last(X)), []
        readers = (lambda c: c * 1, lambda c: F.relu(c) - F.relu(-c), lambda c: (c + R) - R)
        threads = [threading.Thread(target=lambda read=read: found.append(read(c))) for read in readers * 2]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert len(found) == 6
        for each in found:
            torch.testing.assert_close(each, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("convolution", [nn.Conv2d(4, 6, 3, stride=2), nn.Conv3d(4, 6, (1, 3, 3), padding="same")])
def test_sizes_kinds_and_modes(convolution, monkeypatch):
    ours, axes = converted(nn.Sequential(convolution))[0], convolution.weight.dim() - 2
    x = channels_last(torch.randn(2, 4, *[9] * axes))
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            c = ours(x)
            assert type(c) is Pending
            assert torch.equal(c * 1, convolution(x))
    with torch.inference_mode():
        torch.testing.assert_close(F.relu(ours(x)), F.relu(convolution(x)))
    torch.testing.assert_close(ours(x[0]), convolution(x[0]), msg="without a sample")
    monkeypatch.setattr(pending, "_FEWEST_ON_CUDA", convolution(x).numel() * 2)
    assert type(ours(x)) is torch.Tensor
    ours.stride = [*ours.stride]
    torch.testing.assert_close(ours(x), convolution(x))
    for wrong in (torch.randn(1), torch.randn(6, 1, 1), torch.randn(6, dtype=torch.double)):
        with pytest.raises(RuntimeError, match="bias"):
            ours._conv_forward(x, ours.weight, wrong)
    with pytest.raises(RuntimeError, match="to have 4 channels, but got 5 channels instead"):
        ours(torch.randn(2, 5, *[9] * axes))
    ours.stride, ours.padding = 0, 0
    with pytest.raises(RuntimeError, match="non-positive stride is not supported"):
        ours(x)


def test_own_forwards_and_hooks():
    class Padded(nn.Conv2d):
        def forward(self, x):
            return super().forward(F.pad(x, (1, 1, 1, 1)))

    plain = network("instance")
    plain[0].__class__, plain[0].padding = Padded, (0, 0)
    ours = converted(plain)
    with torch.no_grad():
        assert type(ours[0](channels_last(X))) is Pending
        torch.testing.assert_close(ours(channels_last(X)), plain(X), rtol=1e-4, atol=1e-5)
        seen = []
        ours[0].register_forward_hook(lambda layer, arguments, out: seen.append(out.mean()))
        ours[1].register_forward_pre_hook(lambda layer, arguments: seen.append(arguments[0].std()))
        torch.testing.assert_close(ours(channels_last(X)), plain(X), rtol=1e-4, atol=1e-5)
        assert len(seen) == 2


def test_a_compiled_model_has_its_bias_in_the_convolution():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    ours = converted(network("instance"))
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(channels_last(X)), ours(channels_last(X)), rtol=1e-4, atol=1e-5)
    assert "bias_" not in " ".join(str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("activation", "parameter", "function"),
    [
        ("none", 0.0, lambda y: y),
        ("relu", float("inf"), F.relu),
        ("relu", 6.0, F.relu6),
        ("leaky_relu", 0.1, lambda y: F.leaky_relu(y, 0.1)),
        ("silu", 0.0, F.silu),
        ("gelu", 0.0, F.gelu),
    ],
)
def test_the_operator(activation, parameter, function, dtype):
    x, residual = (channels_last(each.to(dtype)) for each in (torch.randn_like(R), R))
    bias = torch.randn(16, dtype=dtype)
    for added in (None, residual):
        right = function((x.double() + bias.double().view(-1, 1, 1)) + (0 if added is None else added.double()))
        with torch.no_grad():
            out = bias_activation(x, bias, added, activation, parameter)
        tolerance = {torch.bfloat16: 2**-8, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
        torch.testing.assert_close(out.double(), right, rtol=tolerance, atol=tolerance)
        assert out.stride() == x.stride()
        leaves = [each.detach().requires_grad_() for each in (x, bias)]
        if dtype == torch.float32:
            torch.library.opcheck(bias_activation.default, (*leaves, added, activation, parameter))
    with pytest.raises(RuntimeError, match="expected a number for each channel"):
        bias_activation(x, bias[:3], None, "none", 0.0)


def test_what_does_not_wait():
    x, bias = channels_last(torch.randn(2, 6, 4, 4)), torch.randn(6)
    waiting = torch.ops.nhwc.bias_waiting
    assert waiting(x, bias).stride() == x.stride()
    others = [(x.contiguous(), bias), (x, bias[:5]), (x[:0], bias), (x, bias.to("meta")), (x.long(), bias)]
    assert [waiting(*each) for each in others] == [None] * 5
    assert not waiting(x, bias).requires_grad
    bias.requires_grad_()
    assert waiting(x, bias).grad_fn.name() == "NhwcBiasWaitingBackward"
