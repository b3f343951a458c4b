"""Normalisation over channels, and the RMS norm that it is with factors: our kernels on channels-last.

The instruction set is chosen once in a process, so that each is checked in a process of its own: this file is also that
program.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from activations import assert_as_accurate, assert_in_format, channels_last, gradients
from selection import some_of
from test_cpu_levels import LEVELS, check_program_at

from torch_nhwc import functional

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CHANNELS = [2, 3, 16, 33, 64, 96, 384, 1027]
PLANES = [(5, 7), (3, 4, 5)]


def pytorchs(activation):
    """Return the same by PyTorch, in float32 for half precision, as video autoencoders compute it."""

    def call(x, weight, bias=None):
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        sizes = [-1, *[1] * (x.dim() - 2)]
        y = F.normalize(wide) * x.shape[1] ** 0.5 * weight.view(sizes)
        y = y if bias is None else y + bias.view(sizes)
        return (F.silu(y) if activation else y).to(x.dtype)

    return call


def ours(activation):
    def call(x, weight, bias=None):
        return functional.normalize(x, weight=weight, bias=bias, scale=x.shape[1] ** 0.5, activation=activation)

    return call


def check(channels, sizes, dtype, activation, has_bias):
    x = torch.randn(2, channels, *sizes).to(dtype)
    parameters = [(1 + 0.3 * torch.randn(channels)).to(dtype) for _ in range(1 + has_bias)]
    gradient = torch.randn(x.shape).to(dtype)
    # Of few channels a draw says less of an error.
    assert_as_accurate(
        ours(activation), pytorchs(activation), [x, *parameters], gradient, factor=2 if channels > 3 else 8
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", CHANNELS)
def test_results_and_gradients(channels, dtype):
    for sizes, activation, has_bias in itertools.product(PLANES, (None, "silu"), (False, True)):
        check(channels, sizes, dtype, activation, has_bias)


@pytest.mark.levels
@pytest.mark.parametrize("level", some_of(LEVELS, "baseline"))
def test_each_level(level):
    check_program_at(level, __file__)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_rows_of_two_threads_have_the_bits_of_one(dtype):
    x, w = channels_last(torch.randn(2, 96, 60, 61).to(dtype)), torch.randn(96).to(dtype)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(gradients(ours("silu"), [x, w]))
    torch.set_num_threads(1)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_lengths_below_the_least_and_what_is_not_finite():
    x = torch.randn(1, 20, 3, 4)
    x[0, :, 0, 0], x[0, :, 0, 1] = 0, 1e-3
    x[0, 3, 1, 0], x[0, 3, 1, 1] = torch.nan, torch.inf
    results = [
        gradients(lambda x: of.normalize(x, eps=0.1), [arrange(x)], torch.arange(240.0).view(x.shape))
        for of, arrange in ((functional, channels_last), (F, lambda x: x))
    ]
    for own, expected in zip(*results, strict=True):
        torch.testing.assert_close(own, expected, equal_nan=True)


@pytest.mark.parametrize("options", [{"p": 1.0}, {"dim": 2}, {"dim": -1, "p": 3.0}, {"eps": 1}], ids=str)
def test_other_norms_dimensions_and_formats_are_pytorchs(options):
    for x in (torch.randn(2, 6, 4, 5), channels_last(torch.randn(2, 6, 4, 5)), torch.randn(3, 6)):
        if x.dim() > 2 or options.get("dim") != 2:
            torch.testing.assert_close(functional.normalize(x, **options), F.normalize(x, **options))
    out = torch.empty(2, 6, 4, 5)
    assert functional.normalize(torch.ones(2, 6, 4, 5), out=out) is out
    assert torch.equal(out, F.normalize(torch.ones(2, 6, 4, 5)))


def test_parameters_of_another_dtype_decide_that_of_the_result():
    x, w = channels_last(torch.randn(2, 6, 4, 5)).bfloat16(), torch.rand(6)
    out = functional.normalize(x, weight=w, bias=w, activation="silu")
    assert out.dtype == torch.float32
    assert_in_format(out)
    expected = F.silu(F.normalize(x.float()) * w.view(-1, 1, 1) + w.view(-1, 1, 1))
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("activation", ["relu", "gelu_tanh", "leaky_relu"])
def test_other_activations_follow(activation):
    x = channels_last(torch.randn(2, 6, 4, 5))
    theirs = {"relu": F.relu, "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"), "leaky_relu": F.leaky_relu}
    torch.testing.assert_close(functional.normalize(x, activation=activation), theirs[activation](F.normalize(x)))


def test_wrong_arguments():
    x = channels_last(torch.randn(2, 6, 4, 5))
    with pytest.raises(RuntimeError, match=r"expected a weight of a number for each channel .*, got \[5\]"):
        functional.normalize(x, weight=torch.ones(5))
    with pytest.raises(RuntimeError, match=r"expected a bias of a number for each channel .*, got \[6, 2\]"):
        functional.normalize(x, bias=torch.ones(6, 2))
    with pytest.raises(ValueError, match="expected none or silu, got"):
        torch.ops.nhwc.normalize(x, activation="relu")
    with pytest.raises(ValueError, match=r"activation: expected relu, .* got 'tanh'"):
        functional.normalize(x, activation="tanh")


if __name__ == "__main__":
    torch.manual_seed(0)
    for width, kind, follows in itertools.product((2, 5, 33, 96), DTYPES, (None, "silu")):
        check(width, (5, 7), kind, follows, True)
