"""Volumes of a batch of 1: cut into slabs where PyTorch would not call oneDNN, and PyTorch's own elsewhere."""

import time

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import assert_in_format, channels_last, gradients
from compiled_graphs import HAS_NUMBERS, compiled
from convolution_cases import operands
from selection import exhaustive
from torch.utils._python_dispatch import TorchDispatchMode

import torch_nhwc as nhwc
from torch_nhwc import functional

# Inputs, kernels and the other arguments of what is cut.
CUT = {
    "odd depth": ("conv3d", (1, 16, 9, 10, 8), (24, 16, 2, 3, 3), (1, 1)),
    "strides": ("conv3d", (1, 16, 13, 14, 15), (48, 16, 3, 3, 3), ((2, 1, 2), 1)),
    "a large stride": ("conv3d", (1, 16, 20, 14, 15), (24, 16, 2, 3, 3), ((5, 1, 1), 0)),
    "dilations": ("conv3d", (1, 16, 11, 10, 9), (24, 16, 3, 3, 3), (1, (2, 3, 1), (2, 3, 1))),
    "no padding": ("conv3d", (1, 12, 9, 16, 11), (16, 12, 2, 3, 5), (1, 0)),
    "depth of one tap": ("conv3d", (1, 16, 7, 12, 12), (32, 16, 1, 3, 2), (1, (0, 1, 1))),
    "one position in depth": ("conv3d", (1, 32, 3, 21, 20), (16, 32, 3, 3, 3), (1, (0, 1, 1))),
    "one position, strides": ("conv3d", (1, 32, 2, 29, 20), (64, 32, 2, 3, 3), (2, (0, 0, 1))),
    "same": ("conv3d", (1, 16, 9, 10, 8), (24, 16, 3, 5, 3), (1, "same")),
    "doubling": ("conv_transpose3d", (1, 16, 9, 10, 8), (16, 24, 2, 2, 2), (2,)),
    "tripling, odd in the plane": ("conv_transpose3d", (1, 16, 8, 10, 9), (16, 12, 3, 3, 2), ((3, 2, 2), (0, 1, 0))),
}
# What is PyTorch's own, bit for bit.
UNCUT = {
    "two samples": ("conv3d", (2, 16, 9, 10, 8), (24, 16, 2, 3, 3), (1, 1)),
    "groups": ("conv3d", (1, 24, 9, 10, 8), (36, 12, 3, 3, 3), (1, 1, 1, 2)),
    "small": ("conv3d", (1, 4, 5, 5, 5), (4, 4, 3, 3, 3), (1, 1)),
    "large enough for oneDNN": ("conv3d", (1, 32, 26, 25, 4), (8, 32, 3, 3, 3), (1, 1)),
    "overlapping outputs": ("conv_transpose3d", (1, 16, 9, 10, 8), (16, 24, 3, 2, 2), (2,)),
    "output padding": ("conv_transpose3d", (1, 16, 9, 10, 8), (16, 24, 2, 2, 2), (2, 0, 1)),
}


class Batches(TorchDispatchMode):
    """Notes how many samples each convolution has."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.convolution.default:
            self.seen.append(args[0].shape[0])
        return function(*args, **(kwargs or {}))


def batches(function):
    with Batches() as batches:
        function()
    return batches.seen


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", CUT)
def test_slabs_are_exact_and_keep_the_format(name, threads):
    function = CUT[name][0]
    x, w, b, arguments = operands(CUT[name])
    expected = getattr(F, function)(x.double(), w.double(), b.double(), *arguments)
    gradient = torch.randn(expected.shape)
    torch.set_num_threads(threads)
    assert batches(lambda: getattr(functional, function)(x, w, b, *arguments)) == [2]
    got = gradients(getattr(functional, function), (x, w, b), gradient, arguments)
    exact = gradients(getattr(F, function), (x.double(), w.double(), b.double()), gradient, arguments)
    for ours, real in zip(got, exact):
        assert (ours.double() - real).norm() <= 3e-6 * real.norm()
    assert_in_format(got[0])
    assert_in_format(got[1])
    assert got[2].stride() == w.stride()


@pytest.mark.parametrize("name", UNCUT)
def test_what_gains_nothing_is_pytorch_s_own(name):
    function = UNCUT[name][0]
    x, w, b, arguments = operands(UNCUT[name])
    assert batches(lambda: getattr(functional, function)(x, w, b, *arguments)) == [x.shape[0]]
    got = getattr(functional, function)(x, w, b, *arguments)
    assert torch.equal(got, getattr(F, function)(x, w, b, *arguments))


@pytest.mark.parametrize("arrange", [torch.Tensor.double, torch.Tensor.contiguous])
def test_other_dtypes_and_formats_are_not_cut(arrange):
    x, w, b, arguments = operands(CUT["odd depth"])
    x, w, b = arrange(x), arrange(w), arrange(b)
    assert batches(lambda: functional.conv3d(x, w, b, *arguments)) == [1]
    with torch.backends.mkldnn.flags(enabled=False):
        x, w, b, arguments = operands(CUT["odd depth"])
        assert batches(lambda: functional.conv3d(x, w, b, *arguments)) == [1]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["odd depth", exhaustive("doubling")])
def test_compiled_graphs_are_cut_by_pytorch_s_operators_unless_their_sizes_are_symbols(name, dynamic):
    function = CUT[name][0]
    x, w, b, arguments = operands(CUT[name])
    w.requires_grad_()
    call, operators = compiled(lambda x, w: getattr(functional, function)(x, w, b, *arguments), dynamic)
    out, real = call(x, w), getattr(F, function)(x.double(), w.double(), b.double(), *arguments)
    torch.testing.assert_close(out.double(), real, rtol=1e-4, atol=1e-4)
    given, expected = (torch.autograd.grad(each.square().sum(), w)[0] for each in (out, real))
    assert (given - expected).norm() <= 1e-5 * expected.norm()
    assert ("aten.cat.default" in operators) == (HAS_NUMBERS and not dynamic)
    # Without AVX-512, the weight's gradient of the slabs is by our kernels.
    ours = {operator for operator in operators if "nhwc" in operator}
    assert ours <= (set() if dynamic else {"nhwc.convolution_by_kernels_backward.default"})


@pytest.mark.parametrize("is_training", [False, True])
def test_volumes_are_replaced_in_either_mode(is_training):
    model = torch.nn.Sequential(
        torch.nn.Conv3d(16, 24, 3, padding=1),
        torch.nn.Conv3d(24, 24, 3, padding=1, groups=24),
        torch.nn.ConvTranspose3d(24, 8, 2, 2),
        torch.nn.ConvTranspose3d(8, 8, 3, 2),
    ).train(is_training)
    x = channels_last(torch.randn(1, 16, 9, 10, 8))
    expected = model(x)
    stock = [type(layer) for layer in model]
    report = nhwc.convert_(model.requires_grad_(is_training))
    assert {row.path for row in report.plan.layers} == {"0", "1", "2", "3"}
    assert 2 in batches(lambda: model(x))
    torch.testing.assert_close(model(x), expected)
    report.revert()
    assert [type(layer) for layer in model] == stock


@pytest.mark.exhaustive
def test_pytorch_still_computes_such_a_volume_slowly():
    """A fall of the ratio means that PyTorch has mended its rule, and slabs can go."""
    x, w = channels_last(torch.randn(1, 32, 24, 24, 24)), channels_last(torch.randn(32, 32, 3, 3, 3))
    least = {}
    for _ in range(10):
        for function in (F.conv3d, functional.conv3d):
            begin = time.perf_counter()
            function(x, w, None, 1, 1)
            taken = time.perf_counter() - begin
            least[function] = min(taken, least.get(function, taken))
    ratio = least[F.conv3d] / least[functional.conv3d]
    assert ratio > 1.5, f"PyTorch's own takes {ratio:.2f} times as long as slabs do: has its rule been mended?"
