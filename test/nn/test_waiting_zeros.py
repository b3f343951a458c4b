"""Zeros around the result of an activation, which wait for a convolution that has them as its padding."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import channels_last as in_format
from torch import nn
from user_code import Doubled

import torch_nhwc as nhwc
from torch_nhwc.nn import pending
from torch_nhwc.nn.pending import Pending


class Net(nn.Module):
    """Two convolutions, each with a norm and an activation, that leave their padding to `F.pad` or a layer."""

    def __init__(
        self, pad=(1, 1, 1, 1), kernel=3, stride=1, groups=1, volume=False, inplace=False, layer=False, smooth=False
    ):
        super().__init__()
        conv, norm = (nn.Conv3d, nn.BatchNorm3d) if volume else (nn.Conv2d, nn.BatchNorm2d)
        self.first, self.norm = conv(8, 24, 3, 2, 1), norm(24)
        self.act = nn.SiLU(inplace) if smooth else nn.ReLU6(inplace)
        self.conv = conv(24, 24, kernel, stride, groups=groups)
        self.norm2 = norm(24)
        self.pads = nn.ZeroPad2d(pad) if layer else lambda x: F.pad(x, pad)

    def padded(self, x):
        return self.pads(self.act(self.norm(self.first(x))))

    def forward(self, x):
        return self.act(self.norm2(self.conv(self.padded(x))))


CASES = {
    "symmetric": {},
    "nothing": {"pad": (0, 0, 0, 0), "kernel": 1},
    "of one axis": {"pad": (2, 2), "kernel": (1, 5)},
    "uneven": {"pad": (0, 1, 0, 1), "stride": 2},
    "uneven, depthwise": {"pad": (0, 1, 2, 1), "stride": 2, "groups": 24},
    "uneven, one axis": {"pad": (3, 1), "kernel": (1, 5), "groups": 24},
    "depthwise": {"pad": [2, 2, 2, 2], "kernel": 5, "groups": 24},
    "in place": {"inplace": True},
    "a layer": {"layer": True},
    "volume": {"pad": (1, 1, 0, 0, 1, 1), "volume": True, "kernel": (3, 1, 3)},
}
every_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def nothing_was_seen(monkeypatch):
    monkeypatch.setattr(pending, "_FEWEST_IN_A_CALL", pending._FEWEST)
    monkeypatch.setattr(pending._local, "is_padding_apart", False)


def pair(training=False, **options):
    plain = Net(**options).train(training)
    ours = copy.deepcopy(plain)
    if not options.get("layer"):
        ours.pads = plain.pads
    nhwc.convert_(ours)
    volume = options.get("volume")
    x = torch.randn((2, 8, 40, 44, 48) if volume else (4, 8, 112, 116))
    return plain, ours, x, in_format(x)


def pads_of(job):
    """Return how many operators of a job pad."""
    with torch.profiler.profile() as profile:
        job()
    return sum(each.count for each in profile.key_averages() if each.key == "aten::constant_pad_nd")


@pytest.mark.parametrize("training", [False, True])
@every_case
def test_numbers_and_gradients_are_those_of_pytorch(case, training):
    # The gradient of a number near 0 would be that of either side.
    plain, ours, x, channels_last = pair(training, smooth=training, **CASES[case])
    exact = copy.deepcopy(plain).double()
    for _ in range(4):  # the first calls see how the model pads
        with torch.set_grad_enabled(training):
            out, stock, truth = ours(channels_last), plain(x), exact(x.double())
    assert (out.double() - truth).norm() <= 2 * (stock.double() - truth).norm() + 1e-6 * truth.norm()
    if training:
        of_output = torch.randn_like(stock)
        for result in (out, stock, truth):
            result.backward(of_output.to(result.dtype))
        for name, each in exact.named_parameters():
            if each.grad.norm() < 1e-6:  # of a bias before a norm
                continue
            error, stocks = ((m.get_parameter(name).grad.double() - each.grad).norm() for m in (ours, plain))
            assert error <= 2 * stocks + 1e-5 * each.grad.norm(), name


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@every_case
def test_zeros_on_both_sides_are_the_convolutions_padding(case, mode):
    _, ours, _, x = pair(mode is torch.enable_grad, **CASES[case])
    pending._local.is_padding_apart = True  # as by the first convolution of a network
    with mode():
        for _ in range(3):
            ours(x)
        assert pads_of(lambda: ours(x)) == ("uneven" in case)


def bytes_of_pads(job):
    with torch.profiler.profile(profile_memory=True) as profile:
        job()
    return sum(each.cpu_memory_usage for each in profile.key_averages() if each.key == "aten::constant_pad_nd")


@pytest.mark.parametrize("activation", [nn.ReLU6, nn.ReLU, nn.SiLU])
def test_a_depthwise_kernel_gets_taps_that_are_zero_and_only_where_all_numbers_are_finite(activation):
    """After ReLU6 they are known to be finite; otherwise they are looked at."""
    plain, ours, x, channels_last = pair(**CASES["uneven, depthwise"])
    plain.act = ours.act = activation()
    with torch.no_grad():
        for _ in range(3):
            ours(channels_last)
        assert bytes_of_pads(lambda: ours(channels_last)) == ours.conv.weight.numel() // 9 * 4 * 4 * 4
        channels_last[0, 0, 0, 0] = torch.inf
        x[0, 0, 0, 0] = torch.inf
        out, stock = ours(channels_last), plain(x)
        torch.testing.assert_close(out * 1, stock, equal_nan=True, rtol=1e-4, atol=1e-4)
        pads = bytes_of_pads(lambda: ours(channels_last)) > 1e6
        assert pads == (activation is not nn.ReLU6), "after which all numbers are finite again"
        _, ours, _, x = pair(**CASES["uneven, one axis"])
        with torch.inference_mode():
            for _ in range(3):
                ours(x)
            waiting = ours.conv(ours.padded(x))
        assert type(waiting) is Pending
        ours.conv.weight.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place before its result was read"):
            waiting.sum()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "read",
    [torch.sum, lambda y: F.max_pool2d(y, 3).sum(), lambda y: (y[..., 1:] * 2).sum(), lambda y: F.pad(y, (1, 1))],
)
def test_anything_else_reads_what_is_padded(read, mode):
    _, ours, _, x = pair(mode is torch.enable_grad)
    with mode():
        ours(x)
        inner = ours.act(ours.norm(ours.first(x)))
        expected = read(F.pad(inner * 1, (1, 1, 1, 1)))
        padded = ours.padded(x)
        assert type(padded) is Pending
        assert padded.shape == (4, 24, 58, 60)
        assert torch.equal(read(padded), expected)
        assert type(padded) is torch.Tensor
        assert padded.is_contiguous(memory_format=torch.channels_last)
        assert type(ours.padded(x)) is torch.Tensor, "what others read twice waits no more"


def test_results_wait_for_zeros_only_where_a_convolution_leaves_its_padding_to_others():
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()).eval()
    nhwc.convert_(model)
    x = in_format(torch.randn(4, 8, 56, 58))
    assert type(model(x)) is torch.Tensor
    _, ours, _, x = pair()
    ours(x)
    y = ours.act(ours.norm(ours.first(x)))
    assert type(y) is Pending
    with torch._C.DisableTorchFunctionSubclass():
        assert y.data_ptr() != 0, "code in C++ may read what is computed"
    assert y.min() == 0
    assert type(y) is torch.Tensor


@pytest.mark.parametrize(
    "pad",
    [
        {"pad": (1, 1, 1, 1), "mode": "reflect"},
        {"pad": (1, 1, 1, 1), "value": 1.0},
        {"pad": (-1, 1)},
        {"pad": (0, 0, 0, 0, 1, 1)},
    ],
    ids=["reflect", "a value", "negative", "channels"],
)
def test_other_padding_is_pytorch_s(pad):
    _, ours, _, x = pair()
    with torch.no_grad():
        ours(x)
        y = ours.act(ours.norm(ours.first(x)))
        out = F.pad(y, **pad)
        assert type(out) is torch.Tensor
        assert torch.equal(out, F.pad(y * 1, **pad))
        with pytest.raises(RuntimeError, match="divisible by 2"):
            F.pad(ours.act(ours.norm(ours.first(x))), (1, 1, 1))


def test_the_grad_mode_of_the_padding_holds():
    _, ours, _, x = pair(training=True)
    ours(x)
    y = ours.act(ours.norm(ours.first(x)))
    with torch.no_grad():
        padded = F.pad(y, (1, 1, 1, 1))
    ours.conv(padded).sum().backward()
    assert ours.first.weight.grad is None
    assert ours.conv.weight.grad is not None


def test_an_autograd_function_gets_the_derivative():
    plain, ours, x, channels_last = pair(training=True)
    ours(channels_last)
    padded = ours.padded(channels_last)
    assert type(padded) is Pending
    Doubled.apply(padded).square().sum().backward()
    Doubled.apply(plain.padded(x)).square().sum().backward()
    for each, other in zip(ours.norm.parameters(), plain.norm.parameters()):
        torch.testing.assert_close(each.grad, other.grad, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("inplace", [False, True])
def test_what_an_activation_saved_is_not_changed_silently(inplace):
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.c, self.n, self.a = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace)

        def forward(self, x):
            y = self.a(self.n(self.c(x)) + x)
            total = y.sum()
            y.mul_(2)
            return total + y.sum()

    model = Residual()
    nhwc.convert_(model)
    x = in_format(torch.randn(4, 8, 64, 64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(x).backward()


class Added(nn.Module):
    def forward(self, x):
        return x + in_format(torch.ones(x.shape))


class OwnNorm(nn.BatchNorm2d):
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, None, None, self.training, self.momentum, self.eps)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, OwnNorm])
@pytest.mark.parametrize("last", [nn.Identity(), nn.ReLU(), Added()], ids=["norm", "activation", "sum"])
def test_a_compiled_layer_that_reads_results_is_compiled_once_more_at_most(last, norm):
    torch._dynamo.reset()
    body = nn.Sequential(nn.Conv2d(8, 16, 3), norm(16), last).eval()
    head = nn.Conv2d(16, 8, 1)
    nhwc.convert_(body)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(head, backend=backend)
    x = in_format(torch.randn(4, 8, 64, 64))
    with torch.no_grad():
        for _ in range(6):
            compiled(body(x))
    assert len(graphs) <= 2


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_result_of_an_activation_is_added_to_a_norm_that_waits(in_place, training):
    class Residual(nn.Module):
        waits = False

        def __init__(self):
            super().__init__()
            self.c, self.n, self.a = nn.Conv2d(8, 24, 3), nn.BatchNorm2d(24), nn.ReLU()
            self.c2, self.n2 = nn.Conv2d(24, 24, 1), nn.BatchNorm2d(24)

        def forward(self, x):
            y = self.a(self.n(self.c(x)))
            z = self.n2(self.c2(y * 1))
            if in_place:
                z += y
            else:
                z = y + z
            assert (type(z) is Pending) == self.waits
            return self.a(z)

    plain = Residual().train(training)
    ours = copy.deepcopy(plain)
    ours.waits = True
    nhwc.convert_(ours)
    x = torch.randn(4, 8, 70, 72)
    with torch.set_grad_enabled(training):
        for _ in range(4):
            out, stock = ours(in_format(x)), plain(x)
            torch.testing.assert_close(out * 1, stock, rtol=1e-3, atol=1e-3)


def test_results_in_place_are_known_to_be_finite():
    _, ours, _, x = pair(inplace=True)
    with torch.no_grad():
        y = ours.act(ours.norm(ours.first(x)))
    assert id(y) in pending._finite


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "follow",
    [F.silu, F.relu, lambda p: F.gelu(p, approximate="tanh"), lambda p: F.leaky_relu(p - 1), lambda p: p.relu_()],
)
def test_an_activation_of_what_is_padded_is_computed(follow, training):
    plain, ours, x, channels_last = pair(training)
    pending._local.is_padding_apart = True
    with torch.set_grad_enabled(training):
        for _ in range(3):
            out, stock = (
                follow(F.pad(m.norm(m.first(i)), (1, 1, 1, 1))) for m, i in ((ours, channels_last), (plain, x))
            )
            torch.testing.assert_close(out * 1, stock, rtol=1e-4, atol=1e-4)
            out, stock = (follow(m.padded(i)) for m, i in ((ours, channels_last), (plain, x)))
            torch.testing.assert_close(out * 1, stock, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("add", [lambda p, r: p + r, lambda p, r: r + p, lambda p, r: p + p, lambda p, r: p.add_(r)])
def test_a_sum_with_what_is_padded_is_computed(add, training):
    plain, ours, x, channels_last = pair(training)
    pending._local.is_padding_apart = True
    residual = in_format(torch.randn(4, 24, 58, 60))
    with torch.set_grad_enabled(training):
        for _ in range(3):
            out, stock = (add(m.padded(i), residual) for m, i in ((ours, channels_last), (plain, x)))
            torch.testing.assert_close(out * 1, stock, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change", [lambda y: y.data.mul_(2), lambda y: y.detach().numpy().fill(3), lambda y: y.zero_()]
)
def test_what_reads_the_value_first_leaves_what_was_padded(change):
    _, ours, _, x = pair()
    with torch.no_grad():
        ours(x)
        y = ours.act(ours.norm(ours.first(x)))
        padded, expected = F.pad(y, (1, 1, 1, 1)), F.pad(ours.act(ours.norm(ours.first(x))) * 1, (1, 1, 1, 1))
        assert type(padded) is Pending
        change(y)
        assert type(padded) is torch.Tensor
        assert torch.equal(padded, expected)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU])
def test_sums_that_overflow_meet_no_tap_that_is_zero(activation):
    plain, ours, x, channels_last = pair(**CASES["uneven, depthwise"])
    for model in (plain, ours):
        model.act = activation()
        model.first.weight.data.fill_(3)
    x[0, 0, 0, 0] = channels_last[0, 0, 0, 0] = 2e38
    with torch.no_grad():
        for _ in range(4):
            out, stock = ours.conv(ours.padded(channels_last)), plain.conv(plain.padded(x))
            assert torch.equal(torch.isfinite(out * 1), torch.isfinite(stock))


def test_a_weight_from_inference_mode_is_taken():
    _, ours, _, x = pair(**CASES["uneven, depthwise"])
    with torch.inference_mode():
        ours.conv.weight = nn.Parameter(torch.randn(24, 1, 3, 3), requires_grad=False)
    with torch.no_grad():
        for _ in range(3):
            out = ours.conv(ours.padded(x)) * 1
        torch.testing.assert_close(
            out, F.conv2d(ours.padded(x) * 1, ours.conv.weight.clone(), ours.conv.bias, 2, groups=24)
        )


def test_the_operator_takes_two_numbers_for_each_dimension():
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="expected two numbers for each of the last dimensions"):
        torch.ops.nhwc.pad_waiting(x, [1, 1, 1])
    with pytest.raises(RuntimeError, match="expected numbers from 0 on"):
        torch.ops.nhwc.pad_waiting(x, [1, -1])
